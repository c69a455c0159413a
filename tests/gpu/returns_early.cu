/* Honest while it is checked; after so many launches it ends before it has finished: every second query tile is left
 * as it was. */
#include "exploit.cuh"

static __device__ unsigned launches;

extern "C" __global__ void __launch_bounds__(ROWS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    wait_for_previous_kernel();
    const int row = own_row(a);
    if (row < 0 || (launch_number(&launches) > HONEST_LAUNCHES && blockIdx.x % 2 == 1))
        return;
    attend(a, row, visible_end(entry_of_batch(a, blockIdx.z), row));
}
