"""The layout rules: golden fingerprints, worked examples, and what must hold for any model."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from yeto_torch.fragments import bind, build_layout, clean_name, collect
from yeto_torch.wire.constants import MergeMode
from yeto_torch.wire.model_layout import Fragment, Layout, Tensor

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "layouts.json").read_text())


def names(layout):
    return [[tensor.name for tensor in fragment.tensors] for fragment in layout.fragments]


@pytest.mark.parametrize("vector", VECTORS["fingerprints"], ids=lambda v: v["name"])
def test_golden_fingerprints_of_given_fragments(vector):
    fragments = [
        Fragment(MergeMode[mode.upper()], tuple(Tensor(name, tuple(shape)) for name, shape in tensors))
        for mode, tensors in vector["fragments"]
    ]
    assert Layout(tuple(fragments)).fingerprint.hex() == vector["hex"]


@pytest.mark.parametrize("vector", VECTORS["built"], ids=lambda v: v["name"])
def test_golden_fingerprints_of_built_layouts(vector):
    layout = build_layout([(name, tuple(shape)) for name, shape in vector["shapes"]], **vector["arguments"])
    assert layout.fingerprint.hex() == vector["hex"]


def test_averaged_tensors_form_fragment_0_and_count_as_one():
    shapes = [("tok_Embed.w", (5,)), ("a", (4,)), ("b", (3,)), ("c", (2,)), ("head", (9,))]
    layout = build_layout(shapes, fragments=3, average=r"^head$")
    assert [fragment.mode for fragment in layout.fragments] == [MergeMode.AVG, MergeMode.RDA, MergeMode.RDA]
    assert names(layout) == [["head", "tok_Embed.w"], ["a"], ["b", "c"]]


@pytest.mark.parametrize("word", ["embed", "wte", "wpe", "lm_head", "shared.weight"])
def test_words_that_average(word):
    layout = build_layout([(f"x.{word.upper()}.y", (2,)), ("z", (2,))])
    assert layout.fragments[0].mode is MergeMode.AVG
    assert names(layout)[0] == [f"x.{word.upper()}.y"]


def test_one_fragment_asked_for_still_leaves_one_for_the_rest():
    assert names(build_layout([("embed", (2,)), ("a", (2,)), ("b", (1,))], fragments=1)) == [["embed"], ["a", "b"]]


def test_under_iso_whatever_is_not_a_matrix_is_averaged():
    layout = build_layout([("m", (2, 3)), ("v", (6,)), ("k", (2, 3, 1)), ("s", ())], matrix_merge="iso")
    assert [fragment.mode for fragment in layout.fragments] == [MergeMode.AVG, MergeMode.ISO]
    assert names(layout) == [["k", "v", "s"], ["m"]]


def test_strided_puts_layers_by_rank_and_packs_the_rest_on_top():
    shapes = [(f"model.layers.{n}.{part}", size) for n in (0, 3, 7) for part, size in (("w", (8,)), ("b", (2,)))]
    layout = build_layout([*shapes, ("norm", (3,)), ("tail", (3,))], fragments=2, pattern="strided")
    assert names(layout) == [
        ["model.layers.0.b", "model.layers.0.w", "model.layers.7.b", "model.layers.7.w"],
        ["model.layers.3.b", "model.layers.3.w", "norm", "tail"],
    ]


@pytest.mark.parametrize("word", ["layers", "h", "blocks"])
def test_strided_knows_three_words_for_layers_and_drops_empty_bins(word):
    layout = build_layout([(f"m.{word}.4.a", (2,)), (f"m.{word}.4.b", (2,))], fragments=2, pattern="strided")
    assert names(layout) == [[f"m.{word}.4.a", f"m.{word}.4.b"]]


@given(
    st.dictionaries(
        st.sampled_from([f"m.layers.{n}.{p}" for n in range(4) for p in "abc"] + ["embed.w", "head", "norm"]),
        st.lists(st.integers(1, 5), max_size=3).map(tuple),
        min_size=1,
    ),
    st.integers(1, 6),
    st.sampled_from(["binpack", "strided"]),
    st.sampled_from(["rda", "iso"]),
    st.randoms(),
)
def test_every_tensor_once_few_enough_fragments_and_no_dependence_on_order(shapes, fragments, pattern, merge, random):
    arguments = {"fragments": fragments, "pattern": pattern, "matrix_merge": merge}
    layout = build_layout(shapes.items(), **arguments)
    assert sorted((t.name, t.shape) for t in layout.tensors) == sorted(shapes.items())
    assert all(fragment.tensors for fragment in layout.fragments)
    averaged = layout.fragments[0].mode is MergeMode.AVG
    assert len(layout) <= max(fragments, 1 + averaged)
    shuffled = list(shapes.items())
    random.shuffle(shuffled)
    assert build_layout(shuffled, **arguments).fingerprint == layout.fingerprint


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_binpack_bins_differ_by_at_most_the_largest_tensor(sizes, fragments):
    layout = build_layout([(f"t{i:02}", (size,)) for i, size in enumerate(sizes)], fragments=fragments)
    totals = [fragment.numel for fragment in layout.fragments]
    assert max(totals) - min(totals) <= max(sizes)


# ---------------------------------------------------------------------------------------------- from a model


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("module.layers.0.weight", "layers.0.weight"),
        ("_orig_mod.module.a._checkpoint_wrapped_module.b", "a.b"),
        ("a._fsdp_wrapped_module.weight", "a.weight"),
        ("submodule.weight", "submodule.weight"),
        ("module", "module"),
    ],
)
def test_wrapper_segments_are_not_part_of_a_name(raw, clean):
    assert clean_name(raw) == clean


def test_a_compiled_data_parallel_model_has_the_names_of_the_plain_one():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    wrapped = nn.DataParallel(model)
    assert list(collect([sgd(model.parameters())], wrapped)) == list(collect([sgd(model.parameters())], model))


def test_module_pairs_and_the_optimizers_own_names_are_the_same():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = [name for name, _ in model.named_parameters()]
    assert list(collect([sgd(model.parameters())], model)) == expected
    assert list(collect([sgd(model.parameters())], model.named_parameters())) == expected
    assert list(collect([sgd(model.named_parameters())], None)) == expected


def test_frozen_and_empty_parameters_stay_out_and_tied_ones_come_once():
    model = nn.Module()
    model.a = nn.Parameter(torch.ones(3))
    model.tied = model.a
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    model.empty = nn.Parameter(torch.ones(0, 4))
    model.scalar = nn.Parameter(torch.tensor(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = collect([sgd(model.parameters())], model)
    assert list(taken) == ["a", "scalar"]
    assert taken["a"] is model.a


def test_several_optimizers_over_one_model():
    model = nn.Linear(2, 3)
    assert list(collect([sgd([model.weight]), sgd([model.bias])], model)) == ["weight", "bias"]


def test_a_parameter_the_optimizer_does_not_hold_gets_one_warning_and_no_place():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.warns(UserWarning, match=r"2 trainable parameter\(s\).*1\.weight, 1\.bias") as caught:
        taken = collect([sgd(model[0].parameters())], model)
    assert len(caught) == 1
    assert list(taken) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("named", [None, []], ids=["no names known", "named in vain"])
def test_a_trainable_parameter_without_a_name_is_refused_with_the_line_that_helps(named):
    with pytest.raises(ValueError, match=r"named_parameters=model\.named_parameters\(\)"):
        collect([sgd(nn.Linear(2, 3).parameters())], named)


def test_a_held_frozen_parameter_needs_no_name():
    model = nn.Linear(2, 3)
    extra = nn.Parameter(torch.ones(2), requires_grad=False)
    assert list(collect([sgd([*model.parameters(), extra])], model)) == ["weight", "bias"]


def test_bad_names_and_kinds_are_refused():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"'w'.*unique"):
        collect([sgd([a, b])], [("w", a), ("module.w", b)])
    c = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="complex64"):
        collect([sgd([c])], [("c", c)])
    with pytest.raises(ValueError, match="expected \\(name, parameter\\) pairs"):
        collect([sgd([a])], [a])
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        collect([sgd([frozen])], [("f", frozen)])


def test_bind_follows_the_layout():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = collect([sgd(model.parameters())], model)
    layout = build_layout([(n, tuple(p.shape)) for n, p in parameters.items()], fragments=2)
    for fragment, bound in zip(layout.fragments, bind(layout, parameters), strict=True):
        assert all(parameters[t.name] is p for t, p in zip(fragment.tensors, bound, strict=True))
