/* How the clock stamps of a kernel built for `acromion profile --timeline` lie behind its workspace: MARK_HEADER_WORDS
 * words, then uint32_t [MARK_CTAS][MARK_GROUPS][MARK_STEPS][MARK_HITS]: the SM's clock, made odd; 0 or all ones where
 * there was no stamp. Beyond these bounds nothing is noted. Of the header the kernel writes the warps of a group into
 * MARK_WARPS_WORD; it hands its stamps over (and forgets them) only when the program has put 1 into MARK_ASKED_WORD, so
 * that a timed launch does not wait for that. Read by device code (cuda/device/isa/marks.cuh) and by the workbench. */
#ifndef ACR_MARKS_H
#define ACR_MARKS_H

enum {
    MARK_CTAS = 160,
    MARK_GROUPS = 8,
    MARK_STEPS = 16,
    MARK_HITS = 256,
    MARK_HEADER_WORDS = 64,
    MARK_WARPS_WORD = 0,
    MARK_ASKED_WORD = 1
};

#endif
