/* Exit codes, see exit_code.h. */
#include "exit_code.h"

#include <stdio.h>

int report_failure(acr_status status, const char *what)
{
    const char *detail = acr_last_error();
    fprintf(stderr, "acromion: %s%s%s\n", what ? what : "", what ? ": " : "",
            *detail ? detail : acr_status_text(status));
    switch (status) {
    case ACR_INVALID:
    case ACR_FORMAT:
        return EXIT_BAD_INPUT;
    case ACR_UNSUPPORTED:
    case ACR_NO_DEVICE:
    case ACR_NO_WISDOM:
        return EXIT_CANNOT_RUN;
    case ACR_IO:
        return EXIT_FILE;
    default:
        return EXIT_FAULT;
    }
}
