/* Elements of stored types as numbers: what the library needs to make inputs for a measurement, and what the workbench
 * and the tests need to look into tensors. Kernels convert by themselves. */
#ifndef ACR_DTYPE_H
#define ACR_DTYPE_H

#include "acromion.h"

/* One stored element as a double, and a double rounded (to nearest even) into a stored element. */
double acr__load_element(acr_dtype dtype, const void *base, int64_t index);
void acr__store_element(acr_dtype dtype, void *base, int64_t index, double value);

/* The same of so many elements from `first` on. */
void acr__load_elements(double *to, acr_dtype dtype, const void *base, int64_t first, int64_t count);
void acr__store_elements(acr_dtype dtype, void *base, int64_t first, int64_t count, const double *from);

/* The nearest value of a type narrower than float32, ties to even, as if its exponent had no upper end. magnitude >= 0
 * and finite. */
double acr__round_magnitude(acr_dtype dtype, double magnitude);

#endif
