/* liveweight.engine._linear: the product as a Python function.
 *
 * Tensors come as DLPack capsules, which are read and not consumed: float or bfloat16, in the processor's memory. Everything that
 * the kernels trust is checked here, before a byte is touched: types, shapes, strides, and that the result lies apart. What is
 * wrong is a ValueError. The tensors must not change while a call runs: the GIL is released.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "linear.h"

/* What a capsule of the name "dltensor" begins with, as DLPack lays it down. Strides count items; none are those of a tensor
 * without gaps. */
struct dlpack {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t type, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset_bytes;
};

enum { DLPACK_CPU = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 };

enum { X, WEIGHT, OUT, ARGUMENTS };

static const char *const NAMES[ARGUMENTS] = {"x", "weight", "out"};

static int refuse(const char *name, const char *what) {
    PyErr_Format(PyExc_ValueError, "%s %s", name, what);
    return -1;
}

static int read_matrix(PyObject *object, const char *name, struct lw_matrix *matrix) {
    if (!PyCapsule_IsValid(object, "dltensor")) return refuse(name, "is no tensor as DLPack gives it");
    const struct dlpack *tensor = PyCapsule_GetPointer(object, "dltensor");
    if (tensor->device_type != DLPACK_CPU) return refuse(name, "is not in the processor's memory");
    int half = tensor->type == DLPACK_BFLOAT && tensor->bits == 16;
    int fits = (half || (tensor->type == DLPACK_FLOAT && tensor->bits == 32)) && tensor->lanes == 1;
    if (!fits || tensor->ndim != 2) return refuse(name, "is no matrix of float32 or bfloat16");
    int64_t rows = tensor->shape[0], columns = tensor->shape[1];
    *matrix = (struct lw_matrix){(char *)tensor->data + tensor->offset_bytes, rows, columns, columns, half};
    if ((uintptr_t)matrix->data % (half ? 2 : 4) != 0) return refuse(name, "is not aligned");
    if (tensor->strides == NULL) return 0;
    if (columns > 1 && tensor->strides[1] != 1) return refuse(name, "does not have the items of a row side by side");
    if (rows > 1) matrix->stride = tensor->strides[0];
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
    if (weight->stride != weight->columns && weight->columns > 0) return refuse("weight", "has gaps between its rows");
    if (out->rows != x->rows || out->columns != weight->rows) return refuse("out", "is not [rows of x, rows of weight]");
    if (out->half != x->half) return refuse("out", "is not of the type of x");
    if (out->rows == 0 || out->columns == 0) return 0;
    if (out->rows > 1 && out->stride < out->columns && out->stride > -out->columns) return refuse("out", "has rows that overlap");
    if (x->columns == 0) return 0;
    return check_apart(out, x, "x") != 0 ? -1 : check_apart(out, weight, "weight");
}

static PyObject *native_linear(PyObject *self, PyObject *args) {
    PyObject *objects[ARGUMENTS];
    struct lw_matrix matrices[ARGUMENTS];
    int portable = 0, failed = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO|p:linear", &objects[X], &objects[WEIGHT], &objects[OUT], &portable)) return NULL;
    for (int i = 0; i < ARGUMENTS; i++)
        if (read_matrix(objects[i], NAMES[i], &matrices[i]) != 0) return NULL;
    if (check_matrices(&matrices[X], &matrices[WEIGHT], &matrices[OUT]) != 0) return NULL;
    const struct lw_linear_simd *simd = portable ? &lw_linear_portable : lw_linear_best();
    Py_BEGIN_ALLOW_THREADS;
    failed = lw_linear(&matrices[X], &matrices[WEIGHT], &matrices[OUT], simd);
    Py_END_ALLOW_THREADS;
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
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
