/* Numbers as people read them, see text.h. */
#include "text.h"

#include <stdio.h>

char *us_text(char out[24], double us)
{
    int decimals = us < 10 ? 3 : us < 100 ? 2 : us < 1000 ? 1 : 0;
    snprintf(out, 24, "%.*f", decimals, us);
    return out;
}
