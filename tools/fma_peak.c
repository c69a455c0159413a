/* Float32 multiply-adds from registers to registers on the widest vectors of the processor it is compiled for: the
 * peak that bench_cpu_vs_torch.py divides by. Compile with -march=native -ffp-contract=fast. */
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));

enum {
    CHAINS = 10 /* independent ones: two units, latency up to five cycles */
};

/* Runs `rounds` times CHAINS multiply-adds and returns the floating-point operations done. */
double fma_burst(long rounds)
{
    volatile float factor_now = 0.5f,
                   term_now =
                       1.0f; /* the compiler must not know them, nor the chains be equal: it would compute less */
    const vec factor = (vec){0} + factor_now, term = (vec){0} + term_now;
    vec sums[CHAINS];
    for (int chain = 0; chain < CHAINS; chain++) {
        sums[chain] = term * (float)chain;
    }
    for (long round = 0; round < rounds; round++) {
#pragma GCC unroll 16
        for (int chain = 0; chain < CHAINS; chain++) {
            sums[chain] = sums[chain] * factor + term;
        }
    }
    volatile float used;
    for (int chain = 0; chain < CHAINS; chain++) {
        used = sums[chain][0];
        (void)used;
    }
    return 2.0 * LANES * CHAINS * (double)rounds;
}
