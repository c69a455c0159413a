/* Candidates that were prepared beforehand, a file each (docs/manual/evolve.md, "A folder of candidates"): which one
 * comes next, and what became of each, written beside it. Which were taken is in the store: the folder's own files say
 * nothing that a run depends on. */
#ifndef SEARCH_CANDIDATE_FOLDER_H
#define SEARCH_CANDIDATE_FOLDER_H

#include "proposer.h"
#include "store.h"

enum {
    FOLDER_NAME_MAX = 200
};

/* The first file NAME.json by name that the run has not taken yet: NAME, or "" where there is none. *closed: the folder
 * says, by a file `complete`, that no other will come. Errors: ACR_IO when the folder cannot be read, those of the
 * store. */
acr_status folder_next(char name[FOLDER_NAME_MAX], bool *closed, const char *folder, store *s);

/* Reads NAME.json as if a program had answered it, with NAME.c or NAME.cu as its source and NAME.md as its rationale
 * where it has none of its own. Its text gets the key `file`. Free with proposer_answer_free. */
void folder_read(proposer_answer *out, const char *folder, const char *name);

/* Writes a text as NAME and ending into the folder, where it is not there already. Errors: ACR_IO. */
acr_status folder_write(const char *folder, const char *name, const char *ending, const char *text);

#endif
