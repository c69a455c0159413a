/* Counter-based draws, see random.h. */
#include "random.h"

#include "check/inputs.h"

dice dice_of(uint64_t seed, uint64_t stream, int64_t trial)
{
    return (dice){seed, random_bits(seed, stream, (uint64_t)trial), 0};
}

int64_t dice_below(dice *d, int64_t count)
{
    /* 64 bits over a count below 2^31: the bias is below 2^-33, far under what a search could notice. */
    return (int64_t)(random_bits(d->seed, d->trial, d->draw++) % (uint64_t)count);
}

double dice_unit(dice *d)
{
    return (double)(random_bits(d->seed, d->trial, d->draw++) >> 11) * 0x1p-53;
}
