/* The workbench's inputs: the numbers that a seed stands for. */
#include <math.h>

#include "check/inputs.h"
#include "support.h"

enum {
    ROWS = 300,
    DIM = 70 /* a whole chunk of a row, and a part */
};

/* Normal numbers are Box and Muller's of the seed's bits, as the C library has it. */
static void normal_numbers_are_right(void **state)
{
    (void)state;
    static float got[ROWS * DIM];
    const acr_problem p = canonical_of("f32:b1:h1:s300:d70");
    input_fill(got, &p, INPUT_K, 1, ROWS, INPUT_NORMAL, 5, 1);
    double sum = 0, square = 0;
    for (int i = 0; i < ROWS * DIM; i++) {
        const uint64_t bits = random_bits(5, INPUT_K, (uint64_t)i);
        const double radius = sqrt(-2 * log(((double)(bits >> 32) + 0.5) * 0x1p-32));
        const double wanted = radius * cos(2 * acos(-1) * (double)(bits & 0xffffffffu) * 0x1p-32);
        if (!(fabs(got[i] - wanted) <= 1e-9 + 0x1p-24 * fabs(wanted)))
            fail_msg("element %d is %.9g, not %.9g", i, (double)got[i], wanted);
        sum += got[i];
        square += (double)got[i] * got[i];
    }
    const double mean = sum / (ROWS * DIM), variance = square / (ROWS * DIM);
    assert_true(fabs(mean) < 0.03 && fabs(variance - 1) < 0.05); /* more than four standard deviations of 21,000 */
}

/* Kinds are made of the same normal numbers, and a narrower type holds them rounded. */
static void kinds_share_their_numbers(void **state)
{
    (void)state;
    static float normal[ROWS * DIM], shifted[ROWS * DIM], large[ROWS * DIM];
    static uint16_t halves[ROWS * DIM];
    const acr_problem p = canonical_of("f32:b1:h1:s300:d70"), half = canonical_of("f16:b1:h1:s300:d70");
    input_fill(normal, &p, INPUT_Q, 1, ROWS, INPUT_NORMAL, 9, 1);
    input_fill(shifted, &p, INPUT_Q, 1, ROWS, INPUT_SHIFTED, 9, 2);
    input_fill(large, &p, INPUT_Q, 1, ROWS, INPUT_LARGE, 9, 1);
    input_fill(halves, &half, INPUT_Q, 1, ROWS, INPUT_NORMAL, 9, 1);
    for (int i = 0; i < ROWS * DIM; i++) {
        assert_true(fabs(shifted[i] - 1.0 - normal[i]) < 1e-6);
        assert_true(fabs(large[i] - 10.0 * normal[i]) < 1e-5);
        assert_true(fabs(acr__load_element(ACR_F16, halves, i) - normal[i]) <= 0x1p-11 * fabs(normal[i]) + 0x1p-25);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normal_numbers_are_right),
        cmocka_unit_test(kinds_share_their_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
