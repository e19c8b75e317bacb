/* What both compiled modules share: how arrays are taken from Python, and how loops become vector instructions.
 *
 * Plain loops over plain arrays, which GCC and Clang vectorise by themselves. Where the loader can choose (x86-64 with
 * glibc), each kernel exists twice, with AVX2 and without. Products and sums are rounded one by one: the modules are
 * compiled without contraction to FMA, so that every processor gives the same bits. */

#ifndef YETO_ARRAYS_H
#define YETO_ARRAYS_H

#ifdef __FAST_MATH__
#error "fast math gives other bits on every machine"
#endif

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* one build for every Python from 3.11 on */
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute)
#if __has_attribute(target_clones)
#define KERNEL __attribute__((target_clones("avx2", "default"))) static
#endif
#endif
#ifndef KERNEL
#define KERNEL static
#endif
#define INLINE static inline __attribute__((always_inline))

/* Received tensors begin at odd addresses. */
typedef float __attribute__((aligned(1), may_alias)) f32;
typedef uint32_t __attribute__((aligned(1), may_alias)) u32;
typedef uint16_t __attribute__((aligned(1), may_alias)) u16;

INLINE int32_t magnitude(uint32_t bits) { return (int32_t)(bits & 0x7fffffff); }
INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

INLINE uint32_t bits_of(float value)
{
    union { float value; uint32_t bits; } both = {value};
    return both.bits;
}

INLINE float float_of(uint32_t bits)
{
    union { uint32_t bits; float value; } both = {bits};
    return both.value;
}

/* To nearest, ties to even; of what is bounded. */
INLINE uint16_t nearest(uint32_t bits) { return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); }

/* A stretch of values, and what is made of it, stay in the first-level cache. */
enum { STRETCH = 1024 };
INLINE Py_ssize_t stretch(Py_ssize_t left) { return left < STRETCH ? left : STRETCH; }

enum { LARGE_BYTES = 1 << 20 }; /* an array that has left the cache before anybody reads it again */

/* A stretch that is done, to where it belongs. Ordinary stores read memory before they write it, which costs half as
 * much again; of a large array, stores go past the cache. ``settle`` ends them. */
INLINE void store(void *out, const void *from, Py_ssize_t nbytes, bool is_large)
{
    uint8_t *to = out;
    const uint8_t *at = from;
#if defined(__SSE2__)
    if (is_large && nbytes >= 64) {
        Py_ssize_t head = -(intptr_t)to & 15, whole = (nbytes - head) / 16;
        memcpy(to, at, (size_t)head);
        to += head, at += head, nbytes -= head + 16 * whole;
        for (; whole > 0; whole--, to += 16, at += 16)
            _mm_stream_si128((__m128i *)to, _mm_loadu_si128((const __m128i *)at));
    }
#endif
    (void)is_large;
    memcpy(to, at, (size_t)nbytes);
}

INLINE void settle(bool is_large)
{
#if defined(__SSE2__)
    if (is_large) _mm_sfence();
#endif
    (void)is_large;
}

enum { RELEASE_BYTES = 1 << 16 }; /* less work is done sooner than another thread has taken the interpreter over */

/* The arrays of one call. Whatever was taken is given back at its end, with or without an error. */
typedef struct {
    Py_buffer *views;
    Py_ssize_t count;
} Arrays;

INLINE bool begin(Arrays *arrays, Py_ssize_t most)
{
    arrays->count = 0;
    arrays->views = PyMem_Calloc((size_t)most, sizeof *arrays->views);
    if (!arrays->views) PyErr_NoMemory();
    return arrays->views != NULL;
}

/* The memory of an array that must hold ``nbytes``, or as many as it does where that is negative; NULL with an error
 * set. An array that is not contiguous, or not to be written to, is refused by Python. */
INLINE void *take(Arrays *arrays, PyObject *object, Py_ssize_t nbytes, bool writable)
{
    Py_buffer *view = &arrays->views[arrays->count];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0) return NULL;
    arrays->count++;
    if (nbytes >= 0 && view->len != nbytes) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes where %zd belong", view->len, nbytes);
        return NULL;
    }
    return view->buf ? view->buf : (void *)arrays; /* of no bytes, and then nobody looks */
}

/* Of the array taken last. */
INLINE Py_ssize_t nbytes_taken(const Arrays *arrays) { return arrays->views[arrays->count - 1].len; }

INLINE PyObject *end(Arrays *arrays, PyObject *result)
{
    while (arrays->count > 0) PyBuffer_Release(&arrays->views[--arrays->count]);
    PyMem_Free(arrays->views);
    return result;
}

/* Around work on ``nbytes``: other threads may have the interpreter meanwhile, if that is worth it to them. */
#define UNLOCKED(nbytes, work)                                                       \
    do {                                                                             \
        PyThreadState *thread = (nbytes) > RELEASE_BYTES ? PyEval_SaveThread() : NULL; \
        work;                                                                        \
        if (thread) PyEval_RestoreThread(thread);                                    \
    } while (0)

/* The module ``_kernels`` with these functions. */
#define MODULE_OF(methods)                                                                                               \
    static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = 0, .m_methods = methods}; \
    PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }

#endif
