/* The tables of the report and of the documents: headings, and rows of cells as text. In a cell `x` is code, and [x](y)
 * is x with y, the file of results/ where it comes from, or with a / in front any file, from the tree's root. */
#ifndef WORKBENCH_REPORT_TABLES_H
#define WORKBENCH_REPORT_TABLES_H

#include "report_data.h"
#include "report_text.h"

enum {
    TABLE_COLUMNS_MAX = 16
};

typedef struct report_table {
    const char *name;    /* as the markers of documents have it */
    const char *caption; /* one sentence */
    const char *headings[TABLE_COLUMNS_MAX];
    int columns;
    char ***rows; /* [row][column] */
    size_t row_count;
    bool failed; /* for want of memory */
} report_table;

/* Makes the table of that name; NULL when there is none of that name. Free with table_free. */
bool table_make(report_table *out, const char *name, const report_data *data);
void table_free(report_table *table);

/* All names, NULL-terminated. */
extern const char *const table_names[];

/* to_root leads from the document's folder to the tree's: "" for the README, "../" for a page in docs/. */
void table_markdown(report_text *out, const report_table *table, const char *to_root);
void table_html(report_text *out, const report_table *table);

/* The headline: a row for each kind of problem, with the planner's latest record of it, NULL while there is none. */
typedef struct headline_row {
    const char *kind, *problem;
    const char *page; /* where more is said of it, from the tree's root */
    const json_t *ours;
    const json_t *peer; /* the best of PyTorch in the same call; NULL: PyTorch has no such attention */
    double ratio, ratio_low, ratio_high;
} headline_row;
enum {
    HEADLINE_ROWS = 6
};
void headline_make(headline_row out[HEADLINE_ROWS], const report_data *data);

/* Of the records for which `wanted` holds only the latest with the same key, in an array of their own (the records stay
 * the data's); sorted by `before`. Free with free(). NULL without memory or when there is none. */
typedef bool record_wanted(const json_t *record);
typedef void record_key(const json_t *record, char out[512]);
typedef int record_order(const void *a, const void *b); /* of two json_t *const * */
const json_t **records_latest(size_t *count, json_t *const *records, size_t record_count, record_wanted *wanted,
                              record_key *key, record_order *order);

#endif
