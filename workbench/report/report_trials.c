/* The trials of an evolution run, from its SQLite file. Only the table `trial` is read, by name of column. */
#include "report_data.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "internal.h"

#ifdef ACR_SQLITE

#include <sqlite3.h>

static double number_or_nan(sqlite3_stmt *row, int column)
{
    return sqlite3_column_type(row, column) == SQLITE_NULL ? NAN : sqlite3_column_double(row, column);
}

static void copy_text(char *out, size_t capacity, sqlite3_stmt *row, int column)
{
    const unsigned char *text = sqlite3_column_text(row, column);
    snprintf(out, capacity, "%s", text ? (const char *)text : "");
}

static acr_status read_rows(report_run *out, sqlite3_stmt *rows, const char *path)
{
    size_t capacity = 0;
    int step;
    while ((step = sqlite3_step(rows)) == SQLITE_ROW) {
        report_trial *trials = room_for_one(out->trials, out->count, &capacity, sizeof *trials);
        if (!trials) {
            return acr__fail(ACR_NO_MEMORY, "%s: no memory for its trials", path);
        }
        out->trials = trials;
        report_trial *t = &out->trials[out->count++];
        copy_text(t->arm, sizeof t->arm, rows, 0);
        t->number = sqlite3_column_int(rows, 1);
        copy_text(t->status, sizeof t->status, rows, 2);
        t->distinct = sqlite3_column_int(rows, 3) != 0;
        t->improved = sqlite3_column_int(rows, 4) != 0;
        t->speedup = number_or_nan(rows, 5);
        t->low = number_or_nan(rows, 6);
        t->high = number_or_nan(rows, 7);
    }
    return step == SQLITE_DONE ? ACR_OK : acr__fail(ACR_FORMAT, "%s: a row cannot be read", path);
}

acr_status report_read_trials(report_run *out, const char *path)
{
    static const char query[] = "SELECT arm, number, status, is_distinct, is_improved, speedup, speedup_low, "
                                "speedup_high FROM trial WHERE status IS NOT NULL ORDER BY arm DESC, number";
    sqlite3 *db = NULL;
    sqlite3_stmt *rows = NULL;
    acr_status status;
    if (sqlite3_open_v2(path, &db, SQLITE_OPEN_READONLY, NULL) != SQLITE_OK ||
        sqlite3_prepare_v2(db, query, -1, &rows, NULL) != SQLITE_OK) {
        status = acr__fail(ACR_FORMAT, "%s: no table of trials: %s", path, sqlite3_errmsg(db));
    } else {
        status = read_rows(out, rows, path);
    }
    sqlite3_finalize(rows);
    sqlite3_close(db);
    if (status != ACR_OK) {
        free(out->trials);
        *out = (report_run){.trials = NULL};
    }
    return status;
}

#else

acr_status report_read_trials(report_run *out, const char *path)
{
    (void)out;
    return acr__fail(ACR_UNSUPPORTED, "%s: this program was built without SQLite (Debian: libsqlite3-dev)", path);
}

#endif
