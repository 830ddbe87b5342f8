// What Python asks of a driver that swaps.
#pragma once

#include <Python.h>

namespace rekindle {

PyObject* swap(PyObject* arguments);
PyObject* swapped(PyObject* arguments);

}  // namespace rekindle
