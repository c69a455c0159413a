/* No exploit: what the others do while they behave. It must pass, or catching them would show nothing. */
#include "exploit.cuh"

extern "C" __global__ void __launch_bounds__(ROWS) KERNEL_NAME(const __grid_constant__ fwd_args a)
{
    wait_for_previous_kernel();
    const int row = own_row(a);
    if (row >= 0)
        attend(a, row, visible_end(entry_of_batch(a, blockIdx.z), row));
}
