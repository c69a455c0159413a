/* The modes of measuring, see mode.h. */
#include "mode.h"

#include "base/text.h"

static const char *const names[MODE_COUNT] = {
    [MODE_STREAM] = "stream",           [MODE_SUSTAINED] = "sustained", [MODE_FULL_CLOCK] = "full-clock",
    [MODE_ROTATING] = "rotating",       [MODE_COLD] = "cold",           [MODE_CALL] = "call",
    [MODE_CALL_SINGLE] = "call-single",
};

const char *mode_name(bench_mode mode)
{
    return names[mode];
}

bool mode_parse(const char *name, bench_mode *out)
{
    const int index = text_index(names, MODE_COUNT, name);
    if (index >= 0) {
        *out = (bench_mode)index;
    }
    return index >= 0;
}

const char *mode_names(void)
{
    return "stream, sustained, full-clock, rotating, cold, call, call-single";
}

bool mode_is_paced(bench_mode mode)
{
    return mode == MODE_SUSTAINED || mode == MODE_FULL_CLOCK;
}

bool mode_is_call(bench_mode mode)
{
    return mode == MODE_CALL || mode == MODE_CALL_SINGLE;
}

int mode_calls(bench_mode mode)
{
    return mode == MODE_CALL ? 200 : 1;
}

static bool is_from_memory(bench_mode mode)
{
    return mode == MODE_ROTATING || mode == MODE_COLD;
}

double mode_floor_s(bench_mode mode, const floor_times *floor)
{
    return is_from_memory(mode) ? floor->cold_s : floor->warm_s;
}

const char *mode_floor_bound(bench_mode mode, const floor_times *floor)
{
    return is_from_memory(mode) ? floor->cold_bound : floor->warm_bound;
}
