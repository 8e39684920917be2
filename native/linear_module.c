/* liveweight.engine._linear: the product as a Python function.
 *
 * Arrays come as buffers: floats as float ("f"), bfloat16 as 16-bit integers ("h"). Everything that the kernels trust is checked
 * here, before a byte is touched: types, shapes, strides, and that the result lies apart. What is wrong is a ValueError. The
 * arrays must not change while a call runs: the GIL is released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linear.h"

enum { X, WEIGHT, OUT, ARGUMENTS };

struct kind {
    const char *name;
    int flags;
};

static const struct kind KINDS[ARGUMENTS] = {
    {"x", PyBUF_STRIDES | PyBUF_FORMAT},
    {"weight", PyBUF_C_CONTIGUOUS | PyBUF_FORMAT},
    {"out", PyBUF_STRIDES | PyBUF_FORMAT | PyBUF_WRITABLE},
};

/* The arguments of a call, open, and what they mean. */
struct call {
    Py_buffer views[ARGUMENTS];
    int open;
    struct lw_matrix matrices[ARGUMENTS];
};

static void close_call(struct call *call) {
    while (call->open > 0) PyBuffer_Release(&call->views[--call->open]);
}

static int refuse(const char *name, const char *what) {
    PyErr_Format(PyExc_ValueError, "%s %s", name, what);
    return -1;
}

static int open_view(PyObject *object, const struct kind *kind, Py_buffer *view) {
    if (PyObject_GetBuffer(object, view, kind->flags) != 0) {
        PyErr_Clear();
        return refuse(kind->name, "is no array of the kind needed");
    }
    const char *format = view->format;
    int fits = format != NULL && (format[0] == 'f' || format[0] == 'h') && format[1] == '\0';
    fits = fits && view->itemsize == (format[0] == 'h' ? 2 : 4) && view->ndim == 2 && view->suboffsets == NULL;
    fits = fits && (uintptr_t)view->buf % (size_t)view->itemsize == 0;
    if (fits) return 0;
    PyBuffer_Release(view);
    return refuse(kind->name, "is no aligned array of two dimensions and a type that fits");
}

static int read_matrix(const Py_buffer *view, const char *name, struct lw_matrix *matrix) {
    Py_ssize_t item = view->itemsize, rows = view->shape[0], columns = view->shape[1];
    *matrix = (struct lw_matrix){view->buf, rows, columns, 0, view->format[0] == 'h'};
    if (columns > 1 && view->strides[1] != item) return refuse(name, "does not have the items of a row side by side");
    if (rows > 1 && view->strides[0] % item != 0) return refuse(name, "has rows that are not aligned");
    matrix->stride = rows > 1 ? view->strides[0] / item : columns;
    return 0;
}

/* The bytes from the first to the last of a matrix, whichever way its rows run. */
static void span(const struct lw_matrix *matrix, uintptr_t *start, uintptr_t *stop) {
    int64_t item = matrix->half ? 2 : 4, reach = matrix->rows > 0 ? (matrix->rows - 1) * matrix->stride * item : 0;
    *start = (uintptr_t)matrix->data + (uintptr_t)(reach < 0 ? reach : 0);
    *stop = (uintptr_t)matrix->data + (uintptr_t)(reach > 0 ? reach : 0) + (uintptr_t)(matrix->columns * item);
}

static int check_apart(const struct lw_matrix *out, const struct lw_matrix *other, const char *name) {
    uintptr_t start, stop, from, until;
    span(out, &start, &stop);
    span(other, &from, &until);
    return start < until && from < stop ? refuse(name, "lies where the call writes") : 0;
}

static int check_matrices(const struct lw_matrix *x, const struct lw_matrix *weight, const struct lw_matrix *out) {
    if (x->columns != weight->columns) return refuse("weight", "does not have the columns of x");
    if (out->rows != x->rows || out->columns != weight->rows) return refuse("out", "is not [rows of x, rows of weight]");
    if (out->half != x->half) return refuse("out", "is not of the type of x");
    if (out->rows == 0 || out->columns == 0) return 0;
    if (out->rows > 1 && out->stride < out->columns && out->stride > -out->columns) return refuse("out", "has rows that overlap");
    if (x->columns == 0) return 0;
    return check_apart(out, x, "x") != 0 ? -1 : check_apart(out, weight, "weight");
}

static int open_call(PyObject *const *objects, struct call *call) {
    for (call->open = 0; call->open < ARGUMENTS; call->open++)
        if (open_view(objects[call->open], &KINDS[call->open], &call->views[call->open]) != 0) return -1;
    for (int i = 0; i < ARGUMENTS; i++)
        if (read_matrix(&call->views[i], KINDS[i].name, &call->matrices[i]) != 0) return -1;
    return check_matrices(&call->matrices[X], &call->matrices[WEIGHT], &call->matrices[OUT]);
}

static PyObject *native_linear(PyObject *self, PyObject *args) {
    PyObject *objects[ARGUMENTS];
    struct call call = {.open = 0};
    int portable = 0, done = 0, failed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO|p:linear", &objects[X], &objects[WEIGHT], &objects[OUT], &portable)) return NULL;
    if (open_call(objects, &call) == 0) {
        const struct lw_linear_simd *simd = portable ? &lw_linear_portable : lw_linear_best();
        Py_BEGIN_ALLOW_THREADS;
        failed = lw_linear(&call.matrices[X], &call.matrices[WEIGHT], &call.matrices[OUT], simd);
        Py_END_ALLOW_THREADS;
        done = !failed;
        if (failed) PyErr_NoMemory();
    }
    close_call(&call);
    if (done) Py_RETURN_NONE;
    return NULL;
}

static PyObject *native_simd(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyUnicode_FromString(lw_linear_best()->name);
}

static PyMethodDef methods[] = {
    {"linear", native_linear, METH_VARARGS, "linear(x, weight, out, portable=False): out = x times the transpose of weight."},
    {"simd", native_simd, METH_NOARGS, "simd(): the name of the instruction set in use."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_linear", "C kernels: the product of few rows and a weight.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__linear(void) { return PyModule_Create(&module); }
