/* The merge's loops over elements, compiled: one trip over memory for what numpy needs several for.
 *
 * f32 results have the bits of the numpy code in pieces.py and nesterov.py, operation by operation. Sums in f64 are
 * taken in another order than BLAS takes them, always the same one on every processor: LANES sums side by side, then
 * those from left to right. What the functions compute is said in kernels.py. */

#include "../../yeto_torch/protocol/codec/arrays.h"

enum { LANES = 4, STRETCH = 2048 }; /* a stretch of values and what is made of it stay in the first-level cache */

typedef double wide __attribute__((vector_size(8 * LANES), aligned(8)));
typedef float narrow __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

INLINE wide widened(const f32 *in) { return __builtin_convertvector(*(const narrow *)in, wide); }

INLINE double folded(wide sums)
{
    double sum = 0.0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* Where ``products_of`` puts what. */
enum { XX, YY, XY, XR, YR, RR, SUMS };

/* Adds the products of one or two arrays with themselves, each other and a third; compiled once for each choice. Each
 * product of two f32 is exact in f64. */
INLINE void products_of(const f32 *x, const f32 *y, const f32 *r, Py_ssize_t n, double *sums)
{
    wide xx = {0}, yy = {0}, xy = {0}, xr = {0}, yr = {0}, rr = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        wide a = widened(x + i), b = {0}, c = {0};
        xx += a * a;
        if (y) { b = widened(y + i); yy += b * b; xy += a * b; }
        if (r) { c = widened(r + i); rr += c * c; xr += a * c; }
        if (y && r) yr += b * c;
    }
    wide all[SUMS] = {xx, yy, xy, xr, yr, rr};
    for (int s = 0; s < SUMS; s++) sums[s] += folded(all[s]);
    for (; i < n; i++) {
        double a = x[i], b = y ? y[i] : 0.0, c = r ? r[i] : 0.0;
        sums[XX] += a * a; sums[YY] += b * b; sums[XY] += a * b;
        sums[XR] += a * c; sums[YR] += b * c; sums[RR] += c * c;
    }
}

KERNEL void one(const f32 *x, Py_ssize_t n, double *sums) { products_of(x, 0, 0, n, sums); }
KERNEL void pair(const f32 *x, const f32 *y, Py_ssize_t n, double *sums) { products_of(x, y, 0, n, sums); }
KERNEL void one_and(const f32 *x, const f32 *r, Py_ssize_t n, double *sums) { products_of(x, 0, r, n, sums); }
KERNEL void pair_and(const f32 *x, const f32 *y, const f32 *r, Py_ssize_t n, double *s) { products_of(x, y, r, n, s); }

/* out = scale * (factors[0] * values[0] + factors[1] * values[1] + ...); the squares' sum if ``measured``. */
KERNEL double sum(float *out, const f32 *const *values, const float *factors, Py_ssize_t count, float scale,
                  bool measured, Py_ssize_t n)
{
    wide squares = {0};
    double rest = 0.0;
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = n - first < STRETCH ? n - first : STRETCH;
        float *to = out + first;
        float own = factors[0];
        const f32 *in = values[0] + first;
        if ((const f32 *)to != in || own != 1.0f)
            for (Py_ssize_t i = 0; i < size; i++) to[i] = own * in[i];
        for (Py_ssize_t k = 1; k < count; k++) {
            own = factors[k];
            in = values[k] + first;
            for (Py_ssize_t i = 0; i < size; i++) to[i] += own * in[i];
        }
        if (scale != 1.0f)
            for (Py_ssize_t i = 0; i < size; i++) to[i] *= scale;
        if (measured) {
            Py_ssize_t i = 0;
            for (; i + LANES <= size; i += LANES) {
                wide value = widened((const f32 *)to + i);
                squares += value * value;
            }
            for (; i < size; i++) rest += (double)to[i] * to[i];
        }
    }
    return folded(squares) + rest;
}

/* out = along * x + towards * y, reckoned in f64, every operation rounded by itself; the sum of its squares, unrounded. */
KERNEL double blend(float *out, const f32 *x, const f32 *y, double along, double towards, Py_ssize_t n)
{
    wide squares = {0};
    Py_ssize_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        wide value = widened(x + i) * along + widened(y + i) * towards;
        squares += value * value;
        for (int j = 0; j < LANES; j++) out[i + j] = (float)value[j];
    }
    double rest = 0.0;
    for (; i < n; i++) {
        double value = x[i] * along + y[i] * towards;
        rest += value * value;
        out[i] = (float)value;
    }
    return folded(squares) + rest;
}

/* Compiled once for each kind of copy that is made of the parameters on the way. */
INLINE void step(float *params, float *momentum, const f32 *gradient, float lr, float mu, float *copy, u16 *rounded,
                 Py_ssize_t n)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        float buffer = mu * momentum[i] + gradient[i];
        float param = params[i] - lr * (mu * buffer + gradient[i]);
        momentum[i] = buffer;
        params[i] = param;
        if (copy) copy[i] = param;
        if (rounded) rounded[i] = nearest(bits_of(param));
    }
}

KERNEL void step_alone(float *p, float *m, const f32 *d, float lr, float mu, Py_ssize_t n)
{
    step(p, m, d, lr, mu, 0, 0, n);
}

KERNEL void step_and_copy(float *p, float *m, const f32 *d, float lr, float mu, float *copy, Py_ssize_t n)
{
    step(p, m, d, lr, mu, copy, 0, n);
}

KERNEL void step_and_round(float *p, float *m, const f32 *d, float lr, float mu, u16 *copy, Py_ssize_t n)
{
    step(p, m, d, lr, mu, 0, copy, n);
}

/* The f32 arrays of a list, all of one length, that of the first if ``n`` is negative. A table the caller frees; NULL
 * with an error set. */
static const f32 **take_all(Arrays *arrays, PyObject *list, Py_ssize_t count, Py_ssize_t *n)
{
    const f32 **table = PyMem_Calloc((size_t)count, sizeof *table);
    if (!table) return (const f32 **)PyErr_NoMemory();
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *item = PyList_GetItem(list, k);
        table[k] = item ? take(arrays, item, *n < 0 ? -1 : 4 * *n, false) : NULL;
        if (!table[k]) {
            PyMem_Free((void *)table);
            return NULL;
        }
        if (*n < 0) *n = nbytes_taken(arrays) / 4;
    }
    return table;
}

/* Of ``count`` arrays and perhaps a reference, into ``count`` rows of SUMS; XY only where there are just two arrays. */
static void all_products(const f32 *const *x, Py_ssize_t count, const f32 *r, Py_ssize_t n, double *sums)
{
    if (count == 2) {
        if (r) pair_and(x[0], x[1], r, n, sums);
        else pair(x[0], x[1], n, sums);
        sums[SUMS + XX] = sums[YY];
        sums[SUMS + XR] = sums[YR];
        return;
    }
    for (Py_ssize_t first = 0; first < n; first += STRETCH) {
        Py_ssize_t size = n - first < STRETCH ? n - first : STRETCH;
        for (Py_ssize_t k = 0; k < count; k++) {
            if (r) one_and(x[k] + first, r + first, size, sums + k * SUMS);
            else one(x[k] + first, size, sums + k * SUMS);
        }
    }
}

static PyObject *products(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *vectors, *reference, *found = NULL;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &vectors, &reference)) return NULL;
    Py_ssize_t count = PyList_Size(vectors), n = -1;
    Arrays arrays;
    if (!begin(&arrays, count + 1)) return NULL;
    const f32 **x = take_all(&arrays, vectors, count, &n), *r = NULL;
    double *sums = PyMem_Calloc((size_t)count, SUMS * sizeof(double));
    if (x && sums && (reference == Py_None || (r = take(&arrays, reference, 4 * n, false)))) {
        UNLOCKED(4 * n * count, all_products(x, count, r, n, sums));
        found = PyList_New(2 * count + 2);
        for (Py_ssize_t k = 0; found && k < count; k++) {
            PyList_SetItem(found, k, PyFloat_FromDouble(sums[k * SUMS + XX]));
            PyList_SetItem(found, count + k, PyFloat_FromDouble(sums[k * SUMS + XR]));
        }
        if (found) {
            PyList_SetItem(found, 2 * count, PyFloat_FromDouble(sums[XY]));
            PyList_SetItem(found, 2 * count + 1, PyFloat_FromDouble(sums[RR]));
        }
    }
    PyMem_Free(sums);
    PyMem_Free((void *)x);
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
    float *out = take(&arrays, target, -1, true);
    Py_ssize_t n = out ? nbytes_taken(&arrays) / 4 : 0;
    const float *own = out ? take(&arrays, factors, 4 * count, false) : NULL;
    const f32 **values = own ? take_all(&arrays, vectors, count, &n) : NULL;
    if (values) {
        double squares = 0.0;
        UNLOCKED(4 * n * count, squares = sum(out, values, own, count, scale, measured, n));
        result = PyFloat_FromDouble(squares);
    }
    PyMem_Free((void *)values);
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
    float *out = take(&arrays, target, -1, true);
    Py_ssize_t size = out ? nbytes_taken(&arrays) : 0;
    const f32 *x = out ? take(&arrays, first, size, false) : NULL;
    const f32 *y = x ? take(&arrays, second, size, false) : NULL;
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
    float *p = take(&arrays, params, -1, true);
    Py_ssize_t size = p ? nbytes_taken(&arrays) : 0;
    float *m = p ? take(&arrays, momentum, size, true) : NULL;
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
    {"products", products, METH_VARARGS, "(vectors, reference or None) -> sums, in the order of pieces.products"},
    {"weighted_sum", weighted_sum, METH_VARARGS, "(out, vectors, factors f32, scale, is measured) -> sum of squares"},
    {"blend", blended, METH_VARARGS, "(out, x, y, along, towards) -> sum of squares"},
    {"nesterov_step", nesterov_step, METH_VARARGS, "(params, momentum, gradient, lr, mu, copy or None)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = 0, .m_methods = METHODS};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
