/* The codec's loops over elements, compiled: the same bits as the torch or numpy code beside each use, in one trip.
 *
 * Every function takes contiguous arrays of one length and keeps none. A module that was not built is no error: see
 * ``kernels.py``. Which values are bounded, and how bf16 and q4 round, is said in bounds.py, plain.py and q4.py. */

#include "arrays.h"

enum { LIMIT = 0x71800000 }; /* 2^100 as the bits of an f32: whatever is larger, infinite or NaN has larger bits */
enum { BLOCK = 256, BLOCK_BYTES = 4 + BLOCK / 2 };

KERNEL int32_t largest_f32(const u32 *in, Py_ssize_t n)
{
    int32_t worst = 0;
    for (Py_ssize_t i = 0; i < n; i++) worst = larger(worst, magnitude(in[i]));
    return worst;
}

KERNEL int32_t largest_bf16(const u16 *in, Py_ssize_t n)
{
    int16_t worst = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int16_t bits = (int16_t)(in[i] & 0x7fff);
        worst = bits > worst ? bits : worst;
    }
    return (int32_t)worst << 16;
}

/* f32 (wide) or bf16 (half) to either, with the sign bits of ``flip``; compiled once for each kind. */
INLINE int32_t convert(const u32 *wide, const u16 *half, u32 *out, u16 *out_half, Py_ssize_t n, uint32_t flip)
{
    int32_t worst = 0;
    uint32_t scratch[STRETCH];
    uint16_t scratch_half[STRETCH];
    bool is_large = n * (out ? 4 : 2) >= LARGE_BYTES;
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = stretch(n - first);
        for (Py_ssize_t i = 0; i < size; i++) {
            uint32_t bits = wide ? wide[first + i] : (uint32_t)half[first + i] << 16;
            worst = larger(worst, magnitude(bits));
            if (out) scratch[i] = bits ^ flip;
            else scratch_half[i] = (uint16_t)((bits ^ flip) >> 16);
        }
        if (out) store(out + first, scratch, 4 * size, is_large);
        else store(out_half + first, scratch_half, 2 * size, is_large);
    }
    settle(is_large);
    return worst;
}

KERNEL int32_t copy_f32(const u32 *in, u32 *o, Py_ssize_t n, uint32_t flip) { return convert(in, 0, o, 0, n, flip); }
KERNEL int32_t widen(const u16 *in, u32 *o, Py_ssize_t n, uint32_t flip) { return convert(0, in, o, 0, n, flip); }
KERNEL int32_t copy_bf16(const u16 *in, u16 *o, Py_ssize_t n, uint32_t flip) { return convert(0, in, 0, o, n, flip); }

/* Saturating; a NaN stays one. */
KERNEL void narrow(const u32 *in, u16 *out, Py_ssize_t n)
{
    uint16_t scratch[STRETCH];
    bool is_large = 2 * n >= LARGE_BYTES;
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = stretch(n - first);
        for (Py_ssize_t i = 0; i < size; i++) {
            uint32_t bits = in[first + i];
            int32_t own = magnitude(bits), rounded = nearest((uint32_t)own);
            rounded = rounded > 0x7f7f ? 0x7f7f : rounded;
            rounded = own > 0x7f800000 ? 0x7fc0 : rounded;
            scratch[i] = (uint16_t)(rounded | ((bits >> 16) & 0x8000));
        }
        store(out + first, scratch, 2 * size, is_large);
    }
    settle(is_large);
}

/* One trip of ``Snapshots``; compiled once for each kind of base (wide, half or none) and of out. */
INLINE int32_t distance(const f32 *local, const f32 *wide, const u16 *half, f32 *out, u16 *rounded, Py_ssize_t n)
{
    int32_t worst = 0;
    float scratch[STRETCH];
    uint16_t scratch_rounded[STRETCH];
    bool is_large = n * (out ? 4 : 2) >= LARGE_BYTES;
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = stretch(n - first);
        for (Py_ssize_t i = 0; i < size; i++) {
            float value = local[first + i];
            if (wide) value -= wide[first + i];
            if (half) value -= float_of((uint32_t)half[first + i] << 16);
            worst = larger(worst, magnitude(bits_of(value)));
            if (out) scratch[i] = value;
            else scratch_rounded[i] = nearest(bits_of(value));
        }
        if (out) store(out + first, scratch, 4 * size, is_large);
        else store(rounded + first, scratch_rounded, 2 * size, is_large);
    }
    settle(is_large);
    return worst;
}

KERNEL int32_t f32_less_f32(const f32 *x, const f32 *b, f32 *o, Py_ssize_t n) { return distance(x, b, 0, o, 0, n); }
KERNEL int32_t f32_less_bf16(const f32 *x, const u16 *b, f32 *o, Py_ssize_t n) { return distance(x, 0, b, o, 0, n); }
KERNEL int32_t bf16_less_f32(const f32 *x, const f32 *b, u16 *o, Py_ssize_t n) { return distance(x, b, 0, 0, o, n); }
KERNEL int32_t bf16_less_bf16(const f32 *x, const u16 *b, u16 *o, Py_ssize_t n) { return distance(x, 0, b, 0, o, n); }
KERNEL int32_t bf16_alone(const f32 *x, u16 *o, Py_ssize_t n) { return distance(x, 0, 0, 0, o, n); }

/* One whole block. ``level``: the seven ratios from which on a level is reached, least first. */
INLINE void pack(const f32 *in, uint8_t *out, const f32 *level)
{
    int32_t worst = 0;
    for (int i = 0; i < BLOCK; i++) worst = larger(worst, magnitude(bits_of(in[i])));
    float scale = float_of((uint32_t)worst), divisor = worst == 0 ? 1.0f : scale;
    uint8_t nibble[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        float ratio = float_of((uint32_t)magnitude(bits_of(in[i]))) / divisor;
        int32_t found = 0;
        for (int j = 0; j < 7; j++) found += ratio >= level[j];
        nibble[i] = (uint8_t)(found | (in[i] < 0 && ratio >= level[0] ? 8 : 0));
    }
    *(f32 *)out = scale;
    for (int i = 0; i < BLOCK / 2; i++) out[4 + i] = (uint8_t)(nibble[2 * i] | nibble[2 * i + 1] << 4);
}

KERNEL void pack_all(const f32 *in, uint8_t *out, Py_ssize_t n, const f32 *level)
{
    for (; n >= BLOCK; n -= BLOCK, in += BLOCK, out += BLOCK_BYTES) pack(in, out, level);
    if (n > 0) {
        float filled[BLOCK] = {0};
        for (Py_ssize_t i = 0; i < n; i++) filled[i] = in[i];
        pack((const f32 *)filled, out, level);
    }
}

/* 2^(level - 7), or zero, with the sign of bit 3. */
INLINE float unit(uint32_t nibble)
{
    uint32_t level = nibble & 7;
    return float_of((level ? (level + 120) << 23 : 0) | (nibble & 8) << 28);
}

KERNEL void unpack_all(const uint8_t *in, f32 *out, Py_ssize_t n, float sign)
{
    bool is_large = 4 * n >= LARGE_BYTES;
    for (Py_ssize_t first = 0; first < n; first += BLOCK, in += BLOCK_BYTES) {
        float scratch[BLOCK], scale = *(const f32 *)in * sign;
        for (int i = 0; i < BLOCK / 2; i++) {
            scratch[2 * i] = unit(in[4 + i] & 15) * scale;
            scratch[2 * i + 1] = unit(in[4 + i] >> 4) * scale;
        }
        store(out + first, scratch, 4 * (n - first < BLOCK ? n - first : BLOCK), is_large);
    }
    settle(is_large);
}

static PyObject *is_bounded(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *values;
    int is_half, worst = 0;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "Op", &values, &is_half) || !begin(&arrays, 4)) return NULL;
    const void *in = take(&arrays, values, -1, false);
    if (!in) return end(&arrays, NULL);
    Py_ssize_t size = nbytes_taken(&arrays);
    UNLOCKED(size, worst = is_half ? largest_bf16(in, size / 2) : largest_f32(in, size / 4));
    return end(&arrays, PyBool_FromLong(worst <= LIMIT));
}

static PyObject *decode(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *data, *target;
    int is_half, negate, worst = 0;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOpp", &data, &target, &is_half, &negate) || !begin(&arrays, 4)) return NULL;
    void *out = take(&arrays, target, -1, true);
    Py_ssize_t size = out ? nbytes_taken(&arrays) : 0, itemsize = out ? arrays.views[0].itemsize : 0;
    const void *in = out ? take(&arrays, data, is_half && itemsize == 4 ? size / 2 : size, false) : NULL;
    if (!in) return end(&arrays, NULL);
    uint32_t flip = negate ? 0x80000000 : 0;
    UNLOCKED(size, {
        if (!is_half) worst = copy_f32(in, out, size / 4, flip);
        else if (itemsize == 4) worst = widen(in, out, size / 4, flip);
        else worst = copy_bf16(in, out, size / 2, flip);
    });
    return end(&arrays, PyBool_FromLong(worst <= LIMIT));
}

static PyObject *round_to_bf16(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *values, *target;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OO", &values, &target) || !begin(&arrays, 4)) return NULL;
    const void *in = take(&arrays, values, -1, false);
    Py_ssize_t size = in ? nbytes_taken(&arrays) : 0;
    void *out = in ? take(&arrays, target, size / 2, true) : NULL;
    if (!out) return end(&arrays, NULL);
    UNLOCKED(size, narrow(in, out, size / 4));
    return end(&arrays, Py_NewRef(Py_None));
}

static PyObject *subtract(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *local, *base, *target;
    int is_half_base, is_half_out, worst = 0;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOpOp", &local, &base, &is_half_base, &target, &is_half_out) || !begin(&arrays, 4)) return NULL;
    const void *x = take(&arrays, local, -1, false), *b = NULL;
    Py_ssize_t size = x ? nbytes_taken(&arrays) : 0, n = size / 4;
    void *out = x ? take(&arrays, target, is_half_out ? size / 2 : size, true) : NULL;
    if (out && base != Py_None) b = take(&arrays, base, is_half_base ? size / 2 : size, false);
    if (!out || (base != Py_None && !b)) return end(&arrays, NULL);
    UNLOCKED(size, {
        if (!b)
            worst = is_half_out ? bf16_alone(x, out, n) : copy_f32(x, out, n, 0);
        else if (is_half_out)
            worst = is_half_base ? bf16_less_bf16(x, b, out, n) : bf16_less_f32(x, b, out, n);
        else
            worst = is_half_base ? f32_less_bf16(x, b, out, n) : f32_less_f32(x, b, out, n);
    });
    return end(&arrays, PyBool_FromLong(worst <= LIMIT));
}

static PyObject *encode_q4(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *values, *target, *levels;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOO", &values, &target, &levels) || !begin(&arrays, 4)) return NULL;
    const void *in = take(&arrays, values, -1, false);
    Py_ssize_t size = in ? nbytes_taken(&arrays) : 0, n = size / 4;
    void *out = in ? take(&arrays, target, (n + BLOCK - 1) / BLOCK * BLOCK_BYTES, true) : NULL;
    const void *level = out ? take(&arrays, levels, 7 * sizeof(float), false) : NULL;
    if (!level) return end(&arrays, NULL);
    UNLOCKED(size, pack_all(in, out, n, level));
    return end(&arrays, Py_NewRef(Py_None));
}

static PyObject *decode_q4(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *data, *target;
    int negate;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOp", &data, &target, &negate) || !begin(&arrays, 4)) return NULL;
    void *out = take(&arrays, target, -1, true);
    Py_ssize_t size = out ? nbytes_taken(&arrays) : 0, n = size / 4;
    const void *in = out ? take(&arrays, data, (n + BLOCK - 1) / BLOCK * BLOCK_BYTES, false) : NULL;
    if (!in) return end(&arrays, NULL);
    UNLOCKED(size, unpack_all(in, out, n, negate ? -1.0f : 1.0f));
    return end(&arrays, Py_NewRef(Py_None));
}

static PyMethodDef METHODS[] = {
    {"is_bounded", is_bounded, METH_VARARGS, "(values, is_bf16) -> bool"},
    {"decode", decode, METH_VARARGS, "(data, out, is_bf16, negate) -> whether every value is bounded"},
    {"round_to_bf16", round_to_bf16, METH_VARARGS, "(values f32, out bf16)"},
    {"subtract", subtract, METH_VARARGS, "(local f32, base or None, base is bf16, out, out is bf16) -> bounded?"},
    {"encode_q4", encode_q4, METH_VARARGS, "(values f32, out, the seven levels f32)"},
    {"decode_q4", decode_q4, METH_VARARGS, "(data, out f32, negate); scales are taken as they are"},
    {NULL, NULL, 0, NULL},
};

MODULE_OF(METHODS)
