/* The merge's loops over elements, compiled: one trip over memory for what torch needs several for.
 *
 * f32 results have the bits of the torch code in blocks.py, correction.py and nesterov.py, operation by operation. Sums in f64 are
 * taken in another order than torch takes them, always the same one on every processor: LANES sums side by side, then
 * those from left to right. What the functions compute is said in kernels.py. */

#include "../../yeto_torch/wire/codec/arrays.h"

enum { LANES = 4 };

typedef double wide __attribute__((vector_size(8 * LANES), aligned(8)));
typedef float narrow __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

INLINE wide widened(const f32 *in) { return __builtin_convertvector(*(const narrow *)in, wide); }

/* An array [n] of f32 or bf16, and a stretch of it as f32: its own memory, or widened into ``scratch``. */
typedef struct {
    const void *at;
    bool is_half;
} Source;

INLINE const f32 *load(Source source, Py_ssize_t first, Py_ssize_t size, float *scratch)
{
    if (!source.is_half) return (const f32 *)source.at + first;
    const u16 *in = (const u16 *)source.at + first;
    for (Py_ssize_t i = 0; i < size; i++) scratch[i] = float_of((uint32_t)in[i] << 16);
    return (const f32 *)scratch;
}

/* A sum of as many terms as there are stretches, in two levels: one after another they would lose a digit per ten. */
typedef struct {
    double done, part;
} Sum;

enum { TERMS = 512 };

INLINE void gather(Sum *sum, double term, Py_ssize_t first)
{
    sum->part += term;
    if (first / STRETCH % TERMS == TERMS - 1) {
        sum->done += sum->part;
        sum->part = 0.0;
    }
}

INLINE double total(Sum sum) { return sum.done + sum.part; }

INLINE double folded(wide sums)
{
    double sum = 0.0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* Sums of products of two arrays x and y with themselves, each other and a reference r. */
enum { XX, YY, XY, XR, YR, RR, SUMS };

/* Those of one stretch; compiled once for each choice. Each product of two f32 is exact in f64. */
INLINE void products_of(const f32 *x, const f32 *y, const f32 *r, bool crossed, bool squared_r, Py_ssize_t n,
                        double *sums)
{
    wide xx = {0}, yy = {0}, xy = {0}, xr = {0}, yr = {0}, rr = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        wide a = widened(x + i), b = {0}, c = {0};
        xx += a * a;
        if (y) { b = widened(y + i); yy += b * b; }
        if (y && crossed) xy += a * b;
        if (r) { c = widened(r + i); xr += a * c; }
        if (r && squared_r) rr += c * c;
        if (y && r) yr += b * c;
    }
    wide all[SUMS] = {xx, yy, xy, xr, yr, rr};
    for (int s = 0; s < SUMS; s++) sums[s] = folded(all[s]);
    for (; i < n; i++) {
        double a = x[i], b = y ? y[i] : 0.0, c = r ? r[i] : 0.0;
        sums[XX] += a * a;
        if (y) sums[YY] += b * b;
        if (y && crossed) sums[XY] += a * b;
        if (r) sums[XR] += a * c;
        if (r && squared_r) sums[RR] += c * c;
        if (y && r) sums[YR] += b * c;
    }
}

/* One stretch of one array or two, into SUMS; XY only if ``crossed``, RR only if ``squared_r``. */
KERNEL void products_in(Source x, Source y, Source r, bool crossed, bool squared_r, Py_ssize_t first, Py_ssize_t size,
                        double *sums)
{
    float scratch_x[STRETCH], scratch_y[STRETCH];
    const f32 *a = load(x, first, size, scratch_x), *b = y.at ? load(y, first, size, scratch_y) : 0;
    const f32 *c = r.at ? (const f32 *)r.at + first : 0;
    if (!b && !c) products_of(a, 0, 0, false, false, size, sums);
    else if (!b && squared_r) products_of(a, 0, c, false, true, size, sums);
    else if (!b) products_of(a, 0, c, false, false, size, sums);
    else if (!c && crossed) products_of(a, b, 0, true, false, size, sums);
    else if (!c) products_of(a, b, 0, false, false, size, sums);
    else if (crossed) products_of(a, b, c, true, true, size, sums);
    else if (squared_r) products_of(a, b, c, false, true, size, sums);
    else products_of(a, b, c, false, false, size, sums);
}

/* The sum of some values' squares. */
INLINE double squared(const float *values, Py_ssize_t n)
{
    wide squares = {0};
    double rest = 0.0;
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        wide value = widened((const f32 *)values + i);
        squares += value * value;
    }
    for (; i < n; i++) rest += (double)values[i] * values[i];
    return folded(squares) + rest;
}

/* out = scale * (factors[0] * values[0] + factors[1] * values[1] + ...); the sum of its squares if ``measured``. */
KERNEL double sum(f32 *out, const Source *values, const f32 *factors, Py_ssize_t count, float scale, bool measured,
                  Py_ssize_t n)
{
    Sum squares = {0.0, 0.0};
    float scratch[STRETCH], scratch_widened[STRETCH];
    bool is_large = 4 * n >= LARGE_BYTES;
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = stretch(n - first);
        float own = factors[0];
        const f32 *in = load(values[0], first, size, scratch_widened);
        for (Py_ssize_t i = 0; i < size; i++) scratch[i] = own * in[i];
        for (Py_ssize_t k = 1; k < count; k++) {
            own = factors[k];
            in = load(values[k], first, size, scratch_widened);
            for (Py_ssize_t i = 0; i < size; i++) scratch[i] += own * in[i];
        }
        if (scale != 1.0f)
            for (Py_ssize_t i = 0; i < size; i++) scratch[i] *= scale;
        if (measured) gather(&squares, squared(scratch, size), first);
        store(out + first, scratch, 4 * size, is_large);
    }
    settle(is_large);
    return total(squares);
}

/* One stretch: out = along * x + towards * y in f64, every operation rounded by itself; the sum of its squares. */
INLINE double blend_of(f32 *out, const f32 *x, const f32 *y, double along, double towards, Py_ssize_t n)
{
    wide squares = {0};
    double rest = 0.0;
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        wide value = widened(x + i) * along + widened(y + i) * towards;
        squares += value * value;
        for (int j = 0; j < LANES; j++) out[i + j] = (float)value[j];
    }
    for (; i < n; i++) {
        double value = x[i] * along + y[i] * towards;
        rest += value * value;
        out[i] = (float)value;
    }
    return folded(squares) + rest;
}

KERNEL double blend(f32 *out, Source x, const f32 *y, double along, double towards, Py_ssize_t n)
{
    Sum squares = {0.0, 0.0};
    float scratch[STRETCH];
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = stretch(n - first);
        const f32 *a = load(x, first, size, scratch);
        gather(&squares, blend_of(out + first, a, y + first, along, towards, size), first);
    }
    return total(squares);
}

/* Compiled once for each kind of copy that is made of the parameters on the way. */
INLINE void step(f32 *params, f32 *momentum, const f32 *gradient, float lr, float mu, f32 *copy, u16 *rounded,
                 Py_ssize_t n)
{
    uint16_t scratch[STRETCH];
    bool is_large = n * (copy ? 4 : 2) >= LARGE_BYTES;
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = stretch(n - first);
        f32 *p = params + first, *m = momentum + first;
        const f32 *d = gradient + first;
        for (Py_ssize_t i = 0; i < size; i++) {
            float buffer = mu * m[i] + d[i];
            m[i] = buffer;
            p[i] = p[i] - lr * (mu * buffer + d[i]);
            if (rounded) scratch[i] = nearest(bits_of(p[i]));
        }
        if (copy) store(copy + first, p, 4 * size, is_large);
        if (rounded) store(rounded + first, scratch, 2 * size, is_large);
    }
    if (copy || rounded) settle(is_large);
}

KERNEL void step_alone(f32 *p, f32 *m, const f32 *d, float lr, float mu, Py_ssize_t n)
{
    step(p, m, d, lr, mu, 0, 0, n);
}

KERNEL void step_and_copy(f32 *p, f32 *m, const f32 *d, float lr, float mu, f32 *copy, Py_ssize_t n)
{
    step(p, m, d, lr, mu, copy, 0, n);
}

KERNEL void step_and_round(f32 *p, f32 *m, const f32 *d, float lr, float mu, u16 *copy, Py_ssize_t n)
{
    step(p, m, d, lr, mu, 0, copy, n);
}

/* One array of ``n`` values, f32, or bf16 where its items have two bytes. No memory with an error set. */
static Source take_source(Arrays *arrays, PyObject *object, Py_ssize_t n)
{
    Source source = {take(arrays, object, -1, false), false};
    if (!source.at) return source;
    const Py_buffer *view = &arrays->views[arrays->count - 1];
    source.is_half = view->itemsize == 2;
    if (n >= 0 && view->len != n * (source.is_half ? 2 : 4)) {
        PyErr_Format(PyExc_ValueError, "an array of %zd bytes where %zd values belong", view->len, n);
        source.at = NULL;
    }
    return source;
}

/* The arrays of a list, all of one length: that of the first if ``n`` is negative. A table the caller frees; NULL with
 * an error set. */
static Source *take_sources(Arrays *arrays, PyObject *list, Py_ssize_t count, Py_ssize_t *n)
{
    Source *table = PyMem_Calloc((size_t)count, sizeof *table);
    if (!table) return (Source *)PyErr_NoMemory();
    if (count < 1) {
        PyErr_SetString(PyExc_ValueError, "a list of no arrays");
        PyMem_Free(table);
        return NULL;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *item = PyList_GetItem(list, k);
        if (item) table[k] = take_source(arrays, item, *n);
        if (!table[k].at) {
            PyMem_Free(table);
            return NULL;
        }
        if (*n < 0) *n = nbytes_taken(arrays) / (table[k].is_half ? 2 : 4);
    }
    return table;
}

/* Of ``count`` arrays and perhaps a reference, into ``count`` rows of SUMS, two arrays at a time: XX and XR of each. XY
 * only where there are just two, RR in the first row. */
static void all_products(const Source *x, Py_ssize_t count, Source r, Py_ssize_t n, Sum *sums)
{
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        for (Py_ssize_t k = 0; k < count; k += 2) {
            bool is_alone = k + 1 == count;
            Source y = is_alone ? (Source){NULL, false} : x[k + 1];
            Sum *row = sums + k * SUMS, *next = row + SUMS;
            double found[SUMS];
            products_in(x[k], y, r, count == 2, k == 0, first, stretch(n - first), found);
            gather(&row[XX], found[XX], first);
            gather(&row[XY], found[XY], first);
            gather(&row[XR], found[XR], first);
            gather(&row[RR], found[RR], first);
            if (is_alone) continue;
            gather(&next[XX], found[YY], first);
            gather(&next[XR], found[YR], first);
        }
    }
}

/* Sets item ``index``; NULL, and the list is gone, where there is no memory for it. */
static PyObject *with_item(PyObject *list, Py_ssize_t index, Sum sum)
{
    PyObject *item = list ? PyFloat_FromDouble(total(sum)) : NULL;
    if (!item || PyList_SetItem(list, index, item) < 0) {
        Py_XDECREF(list);
        return NULL;
    }
    return list;
}

static PyObject *products(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *vectors, *reference, *found = NULL;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &vectors, &reference)) return NULL;
    Py_ssize_t count = PyList_Size(vectors), n = -1;
    Arrays arrays;
    if (!begin(&arrays, count + 1)) return NULL;
    Source *x = take_sources(&arrays, vectors, count, &n), r = {NULL, false};
    if (x && reference != Py_None) r.at = take(&arrays, reference, 4 * n, false);
    if (x && (r.at || reference == Py_None)) {
        Sum *sums = PyMem_Calloc((size_t)count, SUMS * sizeof *sums);
        if (!sums) PyErr_NoMemory();
        else {
            UNLOCKED(4 * n * count, all_products(x, count, r, n, sums));
            found = PyList_New(2 * count + 2);
            for (Py_ssize_t k = 0; k < count; k++) {
                found = with_item(found, k, sums[k * SUMS + XX]);
                found = with_item(found, count + k, sums[k * SUMS + XR]);
            }
            found = with_item(found, 2 * count, sums[XY]);
            found = with_item(found, 2 * count + 1, sums[RR]);
        }
        PyMem_Free(sums);
    }
    PyMem_Free(x);
    return end(&arrays, found);
}

static PyObject *weighted_sum(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *target, *vectors, *factors, *result = NULL;
    float scale;
    int measured;
    if (!PyArg_ParseTuple(args, "OO!Ofp", &target, &PyList_Type, &vectors, &factors, &scale, &measured)) return NULL;
    Py_ssize_t count = PyList_Size(vectors);
    Arrays arrays;
    if (!begin(&arrays, count + 2)) return NULL;
    f32 *out = take(&arrays, target, -1, true);
    Py_ssize_t n = out ? nbytes_taken(&arrays) / 4 : 0;
    const f32 *own = out ? take(&arrays, factors, 4 * count, false) : NULL;
    Source *values = own ? take_sources(&arrays, vectors, count, &n) : NULL;
    if (values) {
        double squares = 0.0;
        UNLOCKED(4 * n * count, squares = sum(out, values, own, count, scale, measured, n));
        result = PyFloat_FromDouble(squares);
    }
    PyMem_Free(values);
    return end(&arrays, result);
}

static PyObject *blended(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *target, *first, *second;
    double along, towards, squares = 0.0;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOOdd", &target, &first, &second, &along, &towards)) return NULL;
    if (!begin(&arrays, 3)) return NULL;
    f32 *out = take(&arrays, target, -1, true);
    Py_ssize_t size = out ? nbytes_taken(&arrays) : 0;
    Source x = {NULL, false};
    if (out) x = take_source(&arrays, first, size / 4);
    const f32 *y = x.at ? take(&arrays, second, size, false) : NULL;
    if (!y) return end(&arrays, NULL);
    UNLOCKED(3 * size, squares = blend(out, x, y, along, towards, size / 4));
    return end(&arrays, PyFloat_FromDouble(squares));
}

static PyObject *nesterov_step(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *params, *momentum, *gradient, *copy;
    float lr, mu;
    Arrays arrays;
    if (!PyArg_ParseTuple(args, "OOOffO", &params, &momentum, &gradient, &lr, &mu, &copy)) return NULL;
    if (!begin(&arrays, 4)) return NULL;
    f32 *p = take(&arrays, params, -1, true);
    Py_ssize_t size = p ? nbytes_taken(&arrays) : 0;
    f32 *m = p ? take(&arrays, momentum, size, true) : NULL;
    const f32 *d = m ? take(&arrays, gradient, size, false) : NULL;
    void *to = d && copy != Py_None ? take(&arrays, copy, -1, true) : NULL;
    Py_ssize_t size_of_copy = to ? nbytes_taken(&arrays) : 0;
    if (to && size_of_copy != size && size_of_copy != size / 2)
        PyErr_Format(PyExc_ValueError, "a copy of %zd bytes of an array of %zd", size_of_copy, size);
    if (!d || PyErr_Occurred()) return end(&arrays, NULL);
    UNLOCKED(3 * size, {
        if (!to) step_alone(p, m, d, lr, mu, size / 4);
        else if (size_of_copy == size) step_and_copy(p, m, d, lr, mu, to, size / 4);
        else step_and_round(p, m, d, lr, mu, to, size / 4);
    });
    return end(&arrays, Py_NewRef(Py_None));
}

static PyMethodDef METHODS[] = {
    {"products", products, METH_VARARGS, "(vectors, reference or None) -> sums, in the order of blocks.products"},
    {"weighted_sum", weighted_sum, METH_VARARGS, "(out, vectors, factors f32, scale, is measured) -> sum of squares"},
    {"blend", blended, METH_VARARGS, "(out, x, y, along, towards) -> sum of squares"},
    {"nesterov_step", nesterov_step, METH_VARARGS, "(params, momentum, gradient, lr, mu, copy or None)"},
    {NULL, NULL, 0, NULL},
};

MODULE_OF(METHODS)
