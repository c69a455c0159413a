/* What XLA calls for acromion.jax.sdpa. See python/acromion/jax.py for the Python half. */
#ifndef ACR_PY_XLA_H
#define ACR_PY_XLA_H

#include "common.h"

/* _native.xla_handlers() -> (for the CPU, for CUDA): capsules without a name, as jax.ffi.register_ffi_target takes
 * them. */
PyObject *xla_handlers(PyObject *module, PyObject *unused);

/* Called once at import. */
int xla_setup(void);

#endif
