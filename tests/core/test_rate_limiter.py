"""Lines per minute: all of a few, a few of many, and how many were kept back."""

from syncer.core.rate_limiter import RateLimiter, remark


def test_a_few_lines_are_all_told():
    limiter = RateLimiter(3)
    assert [limiter.take(now) for now in (0.0, 30.0, 59.0)] == [0, 0, 0]


def test_of_many_only_the_first_of_a_minute_are_told_and_the_rest_is_counted():
    limiter = RateLimiter(3)
    told = [limiter.take(second / 100) for second in range(1000)]
    assert told[:3] == [0, 0, 0]
    assert told.count(None) == 997
    assert limiter.take(60.0) == 997
    assert limiter.take(60.0) == 0


def test_a_minute_begins_with_its_first_line():
    limiter = RateLimiter(1)
    assert limiter.take(100.0) == 0
    assert limiter.take(159.9) is None
    assert limiter.take(160.0) == 1
    assert limiter.take(219.9) is None


def test_a_log_line_says_what_is_missing_before_it():
    assert remark(0) == ""
    assert remark(997) == " (997 such lines before it were left out)"
