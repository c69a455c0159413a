/* How the clock stamps of a kernel built for `acromion profile --timeline` lie behind its workspace:
 * MARK_HEADER_WORDS words, the first of them the warps of a group, then uint32_t [MARK_CTAS][MARK_GROUPS][MARK_STEPS][MARK_HITS]: the SM's
 * clock, made odd; 0 or all ones where there was no stamp. Beyond these bounds nothing is noted. Read by device code
 * (cuda/device/marks.cuh) and by the workbench. */
#ifndef ACR_MARKS_H
#define ACR_MARKS_H

enum {
    MARK_CTAS = 160,
    MARK_GROUPS = 8,
    MARK_STEPS = 16,
    MARK_HITS = 256,
    MARK_HEADER_WORDS = 64
};

#endif
