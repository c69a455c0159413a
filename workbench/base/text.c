/* Words and numbers as people read them, see text.h. */
#include "text.h"

#include <stdio.h>
#include <string.h>

char *us_text(char out[24], double us)
{
    int decimals = us < 10 ? 3 : us < 100 ? 2 : us < 1000 ? 1 : 0;
    snprintf(out, 24, "%.*f", decimals, us);
    return out;
}

int text_index(const char *const *names, int count, const char *name)
{
    int i = 0;
    while (i < count && strcmp(names[i], name) != 0) {
        ++i;
    }
    return i < count ? i : -1;
}
