/* The backward pass of a problem: what it adds to a problem's fields and to an execution's buffers. */
#ifndef ACR_BACKWARD_H
#define ACR_BACKWARD_H

#include "acromion.h"

/* Fills in what ACR_BACKWARD adds, and refuses what it cannot be combined with; of a forward problem, refuses what only
 * gradients have. Before strides are filled in. */
acr_status acr__complete_backward(acr_problem *problem);

#endif
