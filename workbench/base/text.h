/* Words and numbers as people read them. */
#ifndef WORKBENCH_TEXT_H
#define WORKBENCH_TEXT_H

/* Microseconds with three or four digits, never in scientific notation: 0.554, 8.863, 13.98, 2830. Returns out. */
char *us_text(char out[24], double us);

/* The index of `name` among `count` names; -1 = it is none of them. */
int text_index(const char *const *names, int count, const char *name);

#endif
