/* A compiled model as a Python callable. Arguments are read through numpy's array struct, through DLPack's C exchange
 * for tensors, else through the buffer protocol; nothing is copied. */
#define PY_SSIZE_T_CLEAN
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#define MOST 16
#define RANK 12
/* Results kept for another call: enough for a caller that holds the last one or two; larger ones gain too little. */
#define KEPT 4
#define KEPT_BYTES 65536

/* DLPack 1.x, the parts read here (public ABI of dmlc/dlpack) */
typedef struct { int32_t type, id; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } DataType;
typedef struct { void *data; Device device; int32_t ndim; DataType dtype; int64_t *shape, *strides; uint64_t offset; } Dense;
typedef struct { struct { uint32_t major, minor; } version; void *previous; void *allocate, *managed_from, *managed_to;
                 int (*dense_from)(void *, Dense *); void *stream; } Exchange;

typedef struct { int32_t version, inputs, outputs, streaming; size_t (*size)(void); void *(*create)(void *);
                 void (*call)(void *, const void *const *, void *const *); void (*prep)(void *); void (*reset)(void *);
                 void (*warm)(void *, int); size_t (*state_size)(void); void (*state_save)(const void *, void *);
                 int (*state_load)(void *, const void *); const char *(*describe)(void); const char *report; } Table;

typedef struct { int rank, type; int64_t count; int64_t shape[RANK]; char name[64], dtype[16]; DataType dl; int item; } Port;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    const Table *table;
    void *memory;
    int borrowed;
    PyObject *owner, *facts, *origin;
    int inputs, outputs;
    Port in[MOST], out[MOST];
    struct { PyArrayObject *array; void *data; PyArray_Descr *type; } kept[MOST][KEPT];
    int turn[MOST];
} Model;

static PyObject *Fault;
static PyTypeObject *tensor_type;
static Exchange *exchange;

static int fits(const Port *p, int rank, const int64_t *shape) {
    if (rank == p->rank && !memcmp(shape, p->shape, sizeof(int64_t) * rank)) return 1;
    /* dimensions of size 1 may be left out or added: the elements are the same */
    int i = 0, j = 0;
    for (;;) {
        while (i < rank && shape[i] == 1) i++;
        while (j < p->rank && p->shape[j] == 1) j++;
        if (i == rank || j == p->rank) return i == rank && j == p->rank;
        if (shape[i++] != p->shape[j++]) return 0;
    }
}

static void write_shape(char *to, size_t room, int rank, const int64_t *shape) {
    size_t n = snprintf(to, room, "(");
    for (int i = 0; i < rank && n < room; i++) n += snprintf(to + n, room - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
    if (n < room) snprintf(to + n, room - n, rank == 1 ? ",)" : ")");
}

static int refuse(const Port *p, int output, const char *what) {
    char shape[160];
    write_shape(shape, sizeof shape, p->rank, p->shape);
    PyErr_Format(Fault, "%s '%s': expected a C-contiguous %s array or CPU tensor of shape %s, got %s", output ? "output" : "input",
                 p->name, p->dtype, shape, what);
    return -1;
}

static int refuse_shape(const Port *p, int output, int rank, const int64_t *shape) {
    char got[160], text[200];
    write_shape(got, sizeof got, rank, shape);
    snprintf(text, sizeof text, "shape %s", got);
    return refuse(p, output, text);
}

static int from_buffer(PyObject *o, const Port *p, int output, void **to) {
    Py_buffer view;
    char text[200];
    if (!PyObject_CheckBuffer(o)) {
        snprintf(text, sizeof text, "an object of type %.100s", Py_TYPE(o)->tp_name);
        return refuse(p, output, text);
    }
    if (PyObject_GetBuffer(o, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (output ? PyBUF_WRITABLE : 0))) {
        PyErr_Clear();
        return refuse(p, output, output ? "one that is not contiguous or not writable" : "one that is not contiguous");
    }
    const char *format = view.format ? view.format : "B";
    while (*format == '<' || *format == '=' || *format == '@') format++;
    const char *known = p->dl.code == 2 ? (p->item == 4 ? "f" : "d") : p->item == 8 ? "lq" : p->item == 4 ? "i" : p->item == 2 ? "h" : "bB?";
    int bad = !format[0] || format[1] || !strchr(known, format[0]);
    int64_t shape[RANK];
    int rank = view.ndim;
    for (int i = 0; i < rank && i < RANK; i++) shape[i] = view.shape[i];
    snprintf(text, sizeof text, "elements of format %.20s", view.format ? view.format : "B");
    *to = view.buf;
    /* whoever called keeps the object, and with it the memory, for the length of the call */
    PyBuffer_Release(&view);
    if (bad) return refuse(p, output, text);
    if (rank > RANK || !fits(p, rank, shape)) return refuse_shape(p, output, rank > RANK ? RANK : rank, shape);
    return 0;
}

static int from_tensor(PyObject *o, const Port *p, int output, void **to) {
    Dense t;
    char text[200];
    if (exchange->dense_from(o, &t)) {
        PyErr_Clear();
        return refuse(p, output, "a tensor that cannot be lent (call .detach() on it)");
    }
    if (t.device.type != 1) return refuse(p, output, "a tensor on another device (call .cpu() on it)");
    if (t.dtype.code != p->dl.code || t.dtype.bits != p->dl.bits || t.dtype.lanes != 1) {
        snprintf(text, sizeof text, "a tensor of %s%d", t.dtype.code == 2 ? "float" : t.dtype.code == 0 ? "int" : t.dtype.code == 4 ? "bfloat" : "type ", t.dtype.bits);
        return refuse(p, output, text);
    }
    if (t.strides) {
        int64_t run = 1;
        for (int i = t.ndim - 1; i >= 0; i--) {
            if (t.shape[i] != 1 && t.strides[i] != run) return refuse(p, output, "a tensor that is not contiguous (call .contiguous() on it)");
            run *= t.shape[i];
        }
    }
    if (!fits(p, t.ndim, t.shape)) return refuse_shape(p, output, t.ndim, t.shape);
    *to = (char *)t.data + t.offset;
    return 0;
}

static inline int resolve(PyObject *o, const Port *p, int output, void **to) {
    if (Py_TYPE(o) == &PyArray_Type || PyArray_Check(o)) {
        PyArrayObject *a = (PyArrayObject *)o;
        char text[200];
        if (PyArray_TYPE(a) != p->type || !PyArray_ISNOTSWAPPED(a)) {
            PyObject *name = PyObject_Str((PyObject *)PyArray_DESCR(a));
            snprintf(text, sizeof text, "one of %.100s", name ? PyUnicode_AsUTF8(name) : "another type");
            Py_XDECREF(name);
            return refuse(p, output, text);
        }
        if (!PyArray_IS_C_CONTIGUOUS(a)) return refuse(p, output, "one that is not C-contiguous (numpy.ascontiguousarray copies it)");
        if (output && !PyArray_ISWRITEABLE(a)) return refuse(p, output, "one that is read-only");
        if (!fits(p, PyArray_NDIM(a), (const int64_t *)PyArray_DIMS(a))) return refuse_shape(p, output, PyArray_NDIM(a), (const int64_t *)PyArray_DIMS(a));
        *to = PyArray_DATA(a);
        return 0;
    }
    if (exchange && (Py_TYPE(o) == tensor_type || PyObject_TypeCheck(o, tensor_type))) return from_tensor(o, p, output, to);
    return from_buffer(o, p, output, to);
}

static int wrong_count(Model *m, Py_ssize_t n, int wanted, const char *what) {
    PyErr_Format(Fault, "expected %d %s, got %zd", wanted, what, n);
    return -1;
}

/* A result nobody but the model holds (one reference, no weak one; whatever lends its memory holds a reference), and that
 * nobody changed the shape, type, flags or memory of, is as good as new: the call writes all of it. Making an array costs
 * more than a small model. */
static inline int is_free(const Model *m, int i, int k) {
#ifdef Py_GIL_DISABLED
    return 0;
#else
    PyArrayObject *a = m->kept[i][k].array;
    const Port *p = &m->out[i];
    if (!a || Py_REFCNT(a) != 1) return 0;
    PyArrayObject_fields *f = (PyArrayObject_fields *)a;
    return f->nd == p->rank && !memcmp(f->dimensions, p->shape, sizeof(int64_t) * p->rank) && f->data == m->kept[i][k].data &&
           f->descr == m->kept[i][k].type && !f->base && !f->weakreflist &&
           (f->flags & (NPY_ARRAY_CARRAY | NPY_ARRAY_OWNDATA)) == (NPY_ARRAY_CARRAY | NPY_ARRAY_OWNDATA);
#endif
}

static PyObject *make_result(Model *m, int i) {
    for (int n = 0, k = m->turn[i]; n < KEPT; n++, k = (k + 1) % KEPT)
        if (is_free(m, i, k)) {
            m->turn[i] = k;
            PyObject *a = (PyObject *)m->kept[i][k].array;
            Py_INCREF(a);
            return a;
        }
    PyObject *made = PyArray_SimpleNew(m->out[i].rank, (npy_intp *)m->out[i].shape, NPY_FLOAT32);
#ifndef Py_GIL_DISABLED
    if (made && m->out[i].count * 4 <= KEPT_BYTES) {
        int k = m->turn[i] = (m->turn[i] + 1) % KEPT;
        PyArrayObject *before = m->kept[i][k].array, *a = (PyArrayObject *)made;
        Py_INCREF(made);
        m->kept[i][k].array = a;
        m->kept[i][k].data = PyArray_DATA(a);
        m->kept[i][k].type = PyArray_DESCR(a);
        Py_XDECREF(before);
    }
#endif
    return made;
}

static PyObject *call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names) {
    Model *m = (Model *)self;
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    const void *in[MOST];
    void *out[MOST];
    PyObject *made[MOST];
    if (names && PyTuple_GET_SIZE(names)) return PyErr_Format(Fault, "inputs are given by position, not by name"), NULL;
    if (n != m->inputs) return wrong_count(m, n, m->inputs, "inputs"), NULL;
    for (int i = 0; i < n; i++)
        if (resolve(args[i], &m->in[i], 0, (void **)&in[i])) return NULL;
    for (int i = 0; i < m->outputs; i++) {
        made[i] = make_result(m, i);
        if (!made[i]) {
            while (i--) Py_DECREF(made[i]);
            return NULL;
        }
        out[i] = PyArray_DATA((PyArrayObject *)made[i]);
    }
    m->table->call(m->memory, in, out);
    if (m->outputs == 1) return made[0];
    PyObject *all = PyTuple_New(m->outputs);
    for (int i = 0; i < m->outputs; i++) {
        if (all) PyTuple_SET_ITEM(all, i, made[i]);
        else Py_DECREF(made[i]);
    }
    return all;
}

static PyObject *into(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Model *m = (Model *)self;
    const void *in[MOST];
    void *out[MOST];
    if (n != m->inputs + m->outputs) return wrong_count(m, n, m->inputs + m->outputs, "arguments: inputs, then outputs"), NULL;
    for (int i = 0; i < m->inputs; i++)
        if (resolve(args[i], &m->in[i], 0, (void **)&in[i])) return NULL;
    for (int i = 0; i < m->outputs; i++)
        if (resolve(args[m->inputs + i], &m->out[i], 1, &out[i])) return NULL;
    m->table->call(m->memory, in, out);
    Py_RETURN_NONE;
}

static PyObject *scalar(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Model *m = (Model *)self;
    const void *in[MOST];
    float value;
    void *out[1] = {&value};
    if (m->outputs != 1 || m->out[0].count != 1) return PyErr_Format(Fault, "scalar() needs a model with one output of one element"), NULL;
    if (n != m->inputs) return wrong_count(m, n, m->inputs, "inputs"), NULL;
    for (int i = 0; i < n; i++)
        if (resolve(args[i], &m->in[i], 0, (void **)&in[i])) return NULL;
    m->table->call(m->memory, in, out);
    return PyFloat_FromDouble(value);
}

static PyObject *prep(PyObject *self, PyObject *unused) {
    ((Model *)self)->table->prep(((Model *)self)->memory);
    Py_RETURN_NONE;
}

static PyObject *reset(PyObject *self, PyObject *unused) {
    ((Model *)self)->table->reset(((Model *)self)->memory);
    Py_RETURN_NONE;
}

static PyObject *warm(PyObject *self, PyObject *args) {
    int times = 100;
    if (!PyArg_ParseTuple(args, "|i", &times)) return NULL;
    ((Model *)self)->table->warm(((Model *)self)->memory, times);
    Py_RETURN_NONE;
}

static PyObject *save_state(PyObject *self, PyObject *unused) {
    Model *m = (Model *)self;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, m->table->state_size());
    if (bytes) m->table->state_save(m->memory, PyBytes_AS_STRING(bytes));
    return bytes;
}

static PyObject *load_state(PyObject *self, PyObject *bytes) {
    Model *m = (Model *)self;
    if (!PyBytes_Check(bytes) || (size_t)PyBytes_GET_SIZE(bytes) != m->table->state_size() ||
        m->table->state_load(m->memory, PyBytes_AS_STRING(bytes)))
        return PyErr_Format(Fault, "expected %zu bytes that state_save() of this model returned", m->table->state_size()), NULL;
    Py_RETURN_NONE;
}

static int read_ports(PyObject *list, Port *ports, int *count) {
    Py_ssize_t n = PyTuple_Size(list);
    if (n < 0 || n > MOST) return PyErr_Format(Fault, "a model may have at most %d inputs and outputs each", MOST), -1;
    *count = (int)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        const char *name, *dtype;
        PyObject *shape;
        int type, code, bits;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(list, i), "sO!siii", &name, &PyTuple_Type, &shape, &dtype, &type, &code, &bits)) return -1;
        Port *p = &ports[i];
        p->rank = (int)PyTuple_GET_SIZE(shape);
        if (p->rank > RANK) return PyErr_Format(Fault, "a tensor may have at most %d dimensions", RANK), -1;
        p->count = 1;
        for (int d = 0; d < p->rank; d++) p->count *= p->shape[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
        snprintf(p->name, sizeof p->name, "%s", name);
        snprintf(p->dtype, sizeof p->dtype, "%s", dtype);
        p->type = type;
        p->dl = (DataType){(uint8_t)code, (uint8_t)bits, 1};
        p->item = bits / 8;
    }
    return 0;
}

static PyObject *make(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long table, memory;
    PyObject *owner, *in, *out, *facts;
    if (!PyArg_ParseTuple(args, "KOO!O!OK", &table, &owner, &PyTuple_Type, &in, &PyTuple_Type, &out, &facts, &memory)) return NULL;
    Model *m = (Model *)type->tp_alloc(type, 0);
    if (!m) return NULL;
    m->vectorcall = call;
    m->table = (const Table *)(uintptr_t)table;
    Py_INCREF(owner);
    m->owner = owner;
    Py_INCREF(facts);
    m->facts = facts;
    Py_INCREF(args);
    m->origin = args;
    if (read_ports(in, m->in, &m->inputs) || read_ports(out, m->out, &m->outputs)) return Py_DECREF(m), NULL;
    if (memory) {
        m->memory = (void *)(uintptr_t)memory;
        m->borrowed = 1;
        return (PyObject *)m;
    }
    if (posix_memalign(&m->memory, 64, (m->table->size() + 63) / 64 * 64)) {
        m->memory = NULL;
        Py_DECREF(m);
        return PyErr_NoMemory();
    }
    m->table->create(m->memory);
    return (PyObject *)m;
}

static void drop(PyObject *self) {
    Model *m = (Model *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (!m->borrowed) free(m->memory);
    for (int i = 0; i < MOST; i++)
        for (int k = 0; k < KEPT; k++) Py_XDECREF(m->kept[i][k].array);
    Py_XDECREF(m->owner);
    Py_XDECREF(m->facts);
    Py_XDECREF(m->origin);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *instance(PyObject *self, PyObject *unused) {
    Model *m = (Model *)self;
    PyObject *args = PyTuple_GetSlice(m->origin, 0, 5), *zero = PyLong_FromLong(0), *full, *made = NULL;
    if (args && zero && (full = Py_BuildValue("(OOOOOO)", PyTuple_GET_ITEM(args, 0), PyTuple_GET_ITEM(args, 1), PyTuple_GET_ITEM(args, 2),
                                               PyTuple_GET_ITEM(args, 3), PyTuple_GET_ITEM(args, 4), zero))) {
        made = PyObject_Call((PyObject *)Py_TYPE(self), full, NULL);
        Py_DECREF(full);
    }
    Py_XDECREF(args);
    Py_XDECREF(zero);
    return made;
}

static PyMethodDef methods[] = {
    {"into", (PyCFunction)(void (*)(void))into, METH_FASTCALL, "into(*inputs, *outputs): compute into arrays that are given."},
    {"scalar", (PyCFunction)(void (*)(void))scalar, METH_FASTCALL, "scalar(*inputs): the only element of the only output, a float."},
    {"prep", prep, METH_NOARGS, "Compute what does not depend on the next event."},
    {"reset", reset, METH_NOARGS, "Forget all events."},
    {"warm", warm, METH_VARARGS, "warm(times=100): touch all memory and run on zeros; the state stays."},
    {"instance", instance, METH_NOARGS, "Another instance of the model, with memory and state of its own."},
    {"state_save", save_state, METH_NOARGS, "The state as bytes."},
    {"state_load", load_state, METH_O, "Set the state to what state_save() returned."},
    {NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Model, vectorcall), READONLY},
    {"owner", T_OBJECT, offsetof(Model, owner), READONLY, "The loaded library."},
    {"facts", T_OBJECT, offsetof(Model, facts), READONLY, "What the library says of itself."},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_call, PyVectorcall_Call}, {Py_tp_methods, methods},
    {Py_tp_members, members}, {Py_tp_doc, "A compiled model: call it with its inputs."}, {0},
};
static PyType_Spec spec = {"hotloop.native.Handle", sizeof(Model), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_BASETYPE, slots};

static PyObject *use_tensors(PyObject *module, PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    if (!capsule) return NULL;
    Exchange *found = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    if (!found) return NULL;
    if (found->version.major == 1 && found->dense_from) {
        Py_INCREF(type);
        tensor_type = (PyTypeObject *)type;
        exchange = found;
    }
    return PyBool_FromLong(found->version.major == 1);
}

static PyObject *use_fault(PyObject *module, PyObject *type) {
    Py_INCREF(type);
    Fault = type;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"use_tensors", use_tensors, METH_O, NULL}, {"use_fault", use_fault, METH_O, NULL}, {NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "hotloop_handle", NULL, -1, functions};

__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit_hotloop_handle(void) {
    import_array();
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
    if (!module || !type || PyModule_AddObject(module, "Handle", type)) return NULL;
    return module;
}
