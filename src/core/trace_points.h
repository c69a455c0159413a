/* How the clock stamps of a kernel built for `acromion profile --timeline` lie behind its workspace:
 * TRACE_HEADER_WORDS words, then uint32_t [TRACE_CTAS][TRACE_GROUPS][TRACE_STEPS][TRACE_HITS]: the SM's clock, made
 * odd; 0 or all ones where there was no stamp. Beyond these bounds nothing is noted. Of the header the kernel writes
 * the warps of a group into TRACE_WARPS_WORD; it hands its stamps over (and forgets them) only when the program has
 * put 1 into TRACE_ASKED_WORD, so that a timed launch does not wait for that. Read by device code
 * (cuda/device/isa/trace_points.cuh) and by the workbench. */
#ifndef ACR_TRACE_POINTS_H
#define ACR_TRACE_POINTS_H

enum {
    TRACE_CTAS = 160,
    TRACE_GROUPS = 8,
    TRACE_STEPS = 16,
    TRACE_HITS = 256,
    TRACE_HEADER_WORDS = 64,
    TRACE_WARPS_WORD = 0,
    TRACE_ASKED_WORD = 1
};

#endif
