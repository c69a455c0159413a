/* The trial store, see store.h and docs/internals/evolve-store.md. The only file that knows SQLite. */
#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sqlite3.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "machine/environment.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "samples are stored as the machine has them: little-endian");

enum {
    APPLICATION_ID = 0x61637265, /* "acre": what file(1) sees */
    BUSY_TIMEOUT_MS = 5000
};

static const char schema[] =
    "CREATE TABLE run (id INTEGER PRIMARY KEY CHECK (id = 1), created TEXT NOT NULL, definition TEXT NOT NULL);"
    "CREATE TABLE slice (id INTEGER PRIMARY KEY, started TEXT NOT NULL, ended TEXT, reason TEXT,"
    "  environment TEXT NOT NULL, noise_floor REAL, control_verdict TEXT, peers TEXT);"
    "CREATE TABLE blob (digest TEXT PRIMARY KEY, bytes BLOB NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE trial (id INTEGER PRIMARY KEY, arm TEXT NOT NULL, number INTEGER NOT NULL, round INTEGER NOT NULL,"
    "  operation TEXT NOT NULL, kernel TEXT NOT NULL, family TEXT NOT NULL, arch TEXT NOT NULL,"
    "  parameters TEXT NOT NULL, cell TEXT NOT NULL, source TEXT REFERENCES blob, descriptor TEXT, rationale TEXT,"
    "  request TEXT REFERENCES blob, answer TEXT REFERENCES blob,"
    "  proposed_in INTEGER NOT NULL REFERENCES slice, proposed_at TEXT NOT NULL,"
    "  finished_in INTEGER REFERENCES slice, finished_at TEXT, wall_s REAL,"
    "  status TEXT, gate TEXT, detail TEXT, identity TEXT, original INTEGER, is_distinct INTEGER,"
    "  is_improved INTEGER, speedup REAL, speedup_low REAL, speedup_high REAL, noise_floor REAL, verdict TEXT,"
    "  device INTEGER, UNIQUE (arm, number));"
    "CREATE TABLE parent (trial INTEGER NOT NULL REFERENCES trial, ordinal INTEGER NOT NULL,"
    "  parent INTEGER NOT NULL, PRIMARY KEY (trial, ordinal)) WITHOUT ROWID;"
    "CREATE TABLE resource (trial INTEGER NOT NULL REFERENCES trial, name TEXT NOT NULL, value INTEGER NOT NULL,"
    "  PRIMARY KEY (trial, name)) WITHOUT ROWID;"
    "CREATE TABLE confirmation (trial INTEGER NOT NULL REFERENCES trial, round INTEGER NOT NULL UNIQUE,"
    "  slice INTEGER NOT NULL REFERENCES slice, at TEXT NOT NULL, status TEXT NOT NULL, gate TEXT NOT NULL,"
    "  detail TEXT NOT NULL, speedup REAL, speedup_low REAL, speedup_high REAL, noise_floor REAL, verdict TEXT,"
    "  PRIMARY KEY (trial, round)) WITHOUT ROWID;"
    /* The three below: of a trial's search (phase 'search'), of its confirmation in a round ('confirm' and the round),
     * and with the slice's number for trial, of the incumbent against itself ('control'; on another device than the
     * first, 'control' and its number). */
    "CREATE TABLE checked (phase TEXT NOT NULL, trial INTEGER NOT NULL, ordinal INTEGER NOT NULL,"
    "  problem TEXT NOT NULL, inputs TEXT NOT NULL, seed TEXT NOT NULL, hidden INTEGER NOT NULL,"
    "  pass INTEGER NOT NULL, err_max REAL, err_rms REAL, err_lse REAL, tol_max REAL, tol_rms REAL, tol_lse REAL,"
    "  PRIMARY KEY (trial, phase, ordinal)) WITHOUT ROWID;"
    "CREATE TABLE timing (phase TEXT NOT NULL, trial INTEGER NOT NULL, ordinal INTEGER NOT NULL,"
    "  problem TEXT NOT NULL, weight REAL NOT NULL, floor_us REAL, incumbent_p50_us REAL, candidate_p50_us REAL,"
    "  candidate_low_us REAL, candidate_high_us REAL, candidate_mad_us REAL, speedup REAL, speedup_low REAL,"
    "  speedup_high REAL, noise_floor REAL, verdict TEXT, blocks INTEGER, incumbent_us BLOB, candidate_us BLOB,"
    "  PRIMARY KEY (trial, phase, ordinal)) WITHOUT ROWID;"
    "CREATE TABLE gate_time (phase TEXT NOT NULL, trial INTEGER NOT NULL, gate TEXT NOT NULL, seconds REAL NOT NULL,"
    "  PRIMARY KEY (trial, phase, gate)) WITHOUT ROWID;"
    "PRAGMA user_version = 3;";

/* Since version 2; %s: TEMP or nothing. profile was in version 1, always empty and with fewer columns. */
static const char profile_schema[] =
    "CREATE %s TABLE profiled (trial INTEGER NOT NULL, ordinal INTEGER NOT NULL, problem TEXT NOT NULL,"
    "  status TEXT NOT NULL, detail TEXT NOT NULL, tool TEXT NOT NULL, diagnosis TEXT NOT NULL,"
    "  slice INTEGER NOT NULL REFERENCES slice, at TEXT NOT NULL, PRIMARY KEY (trial, ordinal)) WITHOUT ROWID;"
    "CREATE %s TABLE profile (trial INTEGER NOT NULL, ordinal INTEGER NOT NULL, name TEXT NOT NULL, value REAL,"
    "  unit TEXT NOT NULL, PRIMARY KEY (trial, ordinal, name)) WITHOUT ROWID;";

/* Since version 3; %s as above. */
static const char device_schema[] =
    "CREATE %s TABLE slice_device (slice INTEGER NOT NULL REFERENCES slice, device INTEGER NOT NULL,"
    "  noise_floor REAL, control_verdict TEXT, PRIMARY KEY (slice, device)) WITHOUT ROWID;";

struct store {
    sqlite3 *db;
    char *path;
    int lock; /* a descriptor of the file, locked while this may write; -1 = none */
};

/* ---- Statements ---- */

static acr_status fail(const store *s, const char *what)
{
    int code = sqlite3_errcode(s->db);
    return acr__fail(code == SQLITE_NOMEM ? ACR_NO_MEMORY : ACR_IO, "%s: %s: %s", s->path, what, sqlite3_errmsg(s->db));
}

static int bind_one(sqlite3_stmt *statement, int at, char kind, va_list *arguments)
{
    switch (kind) {
    case 'i':
        return sqlite3_bind_int64(statement, at, va_arg(*arguments, int64_t));
    case 'n': { /* a number, NULL where it is none */
        double value = va_arg(*arguments, double);
        return isnan(value) ? sqlite3_bind_null(statement, at) : sqlite3_bind_double(statement, at, value);
    }
    case 't':
        return sqlite3_bind_text(statement, at, va_arg(*arguments, const char *), -1, SQLITE_TRANSIENT);
    default: { /* 'b': bytes and their number */
        const void *bytes = va_arg(*arguments, const void *);
        return sqlite3_bind_blob64(statement, at, bytes, va_arg(*arguments, size_t), SQLITE_TRANSIENT);
    }
    }
}

/* Prepares a statement and binds its arguments, one a letter of kinds: i int64_t, n double, t text (NULL = null), b
 * bytes and size_t. */
static acr_status prepare_va(store *s, sqlite3_stmt **out, const char *sql, const char *kinds, va_list *arguments)
{
    if (sqlite3_prepare_v2(s->db, sql, -1, out, NULL) != SQLITE_OK) {
        return fail(s, "a statement");
    }
    for (int i = 0; kinds[i]; ++i) {
        if (bind_one(*out, i + 1, kinds[i], arguments) != SQLITE_OK) {
            sqlite3_finalize(*out);
            return fail(s, "an argument");
        }
    }
    return ACR_OK;
}

static acr_status prepare(store *s, sqlite3_stmt **out, const char *sql, const char *kinds, ...)
{
    va_list arguments;
    va_start(arguments, kinds);
    acr_status status = prepare_va(s, out, sql, kinds, &arguments);
    va_end(arguments);
    return status;
}

/* The same, and runs it; nothing is returned by it. */
static acr_status execute(store *s, const char *sql, const char *kinds, ...)
{
    sqlite3_stmt *statement = NULL;
    va_list arguments;
    va_start(arguments, kinds);
    acr_status status = prepare_va(s, &statement, sql, kinds, &arguments);
    va_end(arguments);
    if (status == ACR_OK) {
        int code = SQLITE_ROW;
        while (code == SQLITE_ROW) {
            code = sqlite3_step(statement);
        }
        if (code != SQLITE_DONE) {
            status = fail(s, "writing");
        }
        sqlite3_finalize(statement);
    }
    return status;
}

/* Whether there is a next row; *status tells of errors. */
static bool next_row(store *s, sqlite3_stmt *statement, acr_status *status)
{
    int code = sqlite3_step(statement);
    if (code != SQLITE_ROW && code != SQLITE_DONE) {
        *status = fail(s, "reading");
    }
    return code == SQLITE_ROW;
}

static acr_status begin(store *s)
{
    return execute(s, "BEGIN IMMEDIATE", "");
}

/* Commits, or takes everything back when status says so. */
static acr_status end(store *s, acr_status status)
{
    if (status == ACR_OK) {
        status = execute(s, "COMMIT", "");
    }
    if (status != ACR_OK && !sqlite3_get_autocommit(s->db)) {
        sqlite3_exec(s->db, "ROLLBACK", NULL, NULL, NULL);
    }
    return status;
}

static const char *column_text(sqlite3_stmt *statement, int column)
{
    return (const char *)sqlite3_column_text(statement, column);
}

static double column_number(sqlite3_stmt *statement, int column)
{
    return sqlite3_column_type(statement, column) == SQLITE_NULL ? NAN : sqlite3_column_double(statement, column);
}

static acr_status query_int(store *s, const char *sql, int64_t *out)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement, sql, "");
    if (status == ACR_OK) {
        *out = next_row(s, statement, &status) ? sqlite3_column_int64(statement, 0) : 0;
        sqlite3_finalize(statement);
    }
    return status;
}

/* ---- Opening ---- */

static acr_status run_script(store *s, const char *script)
{
    return sqlite3_exec(s->db, script, NULL, NULL, NULL) == SQLITE_OK ? ACR_OK : fail(s, "the schema");
}

static acr_status make_profile_tables(store *s, const char *kind)
{
    char script[sizeof profile_schema + 16];
    snprintf(script, sizeof script, profile_schema, kind, kind);
    return run_script(s, script);
}

static acr_status make_device_table(store *s, const char *kind)
{
    char script[sizeof device_schema + 8];
    snprintf(script, sizeof script, device_schema, kind);
    return run_script(s, script);
}

static acr_status make_schema(store *s)
{
    char pragma[64];
    snprintf(pragma, sizeof pragma, "PRAGMA application_id = %d", APPLICATION_ID);
    acr_status status = execute(s, pragma, "");
    if (status == ACR_OK) {
        status = begin(s);
    }
    if (status == ACR_OK) {
        status = run_script(s, schema);
        if (status == ACR_OK) {
            status = make_profile_tables(s, "");
        }
        status = end(s, status == ACR_OK ? make_device_table(s, "") : status);
    }
    return status;
}

/* An older version as this one: in the file where it may be written, else for this connection. */
static acr_status upgrade(store *s, store_mode mode, int64_t version)
{
    const char *kind = mode == STORE_READ ? "TEMP" : "";
    acr_status status = mode == STORE_READ ? ACR_OK : begin(s);
    if (status == ACR_OK && mode != STORE_READ) {
        status = run_script(s, "ALTER TABLE trial ADD COLUMN device INTEGER; PRAGMA user_version = 3;");
    }
    if (status == ACR_OK && mode != STORE_READ && version == 1) {
        status = run_script(s, "DROP TABLE profile;");
    }
    if (status == ACR_OK && version == 1) {
        status = make_profile_tables(s, kind);
    }
    if (status == ACR_OK) {
        status = make_device_table(s, kind);
    }
    return mode == STORE_READ ? status : end(s, status);
}

static acr_status check_version(store *s, store_mode mode)
{
    int64_t application = 0, version = 0;
    acr_status status = query_int(s, "PRAGMA application_id", &application);
    if (status == ACR_OK) {
        status = query_int(s, "PRAGMA user_version", &version);
    }
    const int code = sqlite3_errcode(s->db);
    if (status != ACR_OK && (code == SQLITE_BUSY || code == SQLITE_LOCKED)) {
        return acr__fail(ACR_IO, "%s: locked: another process is writing into this store", s->path);
    }
    if (status != ACR_OK || application != APPLICATION_ID) {
        return acr__fail(ACR_FORMAT, "%s: not a trial store", s->path);
    }
    return version == STORE_VERSION ? ACR_OK
           : version >= 1 && version < STORE_VERSION
               ? upgrade(s, mode, version)
               : acr__fail(ACR_FORMAT, "%s: a trial store of version %lld, this program reads %d", s->path,
                           (long long)version, STORE_VERSION);
}

/* One writer at a time, for as long as the store is open: two searches would each go on from what it read at first. */
static acr_status lock_file(store *s)
{
    s->lock = open(s->path, O_RDONLY | O_CLOEXEC);
    if (s->lock < 0) {
        return acr__fail(ACR_IO, "%s: %s", s->path, strerror(errno));
    }
    if (flock(s->lock, LOCK_EX | LOCK_NB) != 0) {
        return errno == EWOULDBLOCK
                   ? acr__fail(ACR_IO, "%s: locked: another process is writing into this store", s->path)
                   : acr__fail(ACR_IO, "%s: cannot be locked: %s", s->path, strerror(errno));
    }
    return ACR_OK;
}

static acr_status open_file(store *s, store_mode mode)
{
    bool there = access(s->path, F_OK) == 0;
    if (there == (mode == STORE_CREATE)) {
        return acr__fail(ACR_IO, "%s: %s", s->path, there ? "there is a file already" : strerror(errno));
    }
    int flags = mode == STORE_CREATE ? SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE
                : mode == STORE_READ ? SQLITE_OPEN_READONLY
                                     : SQLITE_OPEN_READWRITE;
    if (sqlite3_open_v2(s->path, &s->db, flags, NULL) != SQLITE_OK) {
        return fail(s, "opening");
    }
    sqlite3_busy_timeout(s->db, BUSY_TIMEOUT_MS);
    if (mode != STORE_READ) {
        acr_status status = lock_file(s);
        if (status != ACR_OK) {
            return status;
        }
    }
    if (mode != STORE_CREATE) {
        acr_status status = check_version(s, mode);
        if (status != ACR_OK || mode == STORE_READ) {
            return status;
        }
    }
    acr_status status = execute(s, "PRAGMA journal_mode = WAL", "");
    if (status == ACR_OK) {
        status = execute(s, "PRAGMA synchronous = FULL", "");
    }
    return status == ACR_OK && mode == STORE_CREATE ? make_schema(s) : status;
}

acr_status store_open(store **out, const char *path, store_mode mode)
{
    store *s = calloc(1, sizeof *s);
    if (s) {
        s->lock = -1;
    }
    if (!s || !(s->path = strdup(path))) {
        free(s);
        return acr__fail(ACR_NO_MEMORY, "no memory for the store");
    }
    acr_status status = open_file(s, mode);
    if (status != ACR_OK) {
        store_close(s);
        return status;
    }
    *out = s;
    return ACR_OK;
}

void store_close(store *s)
{
    if (s) {
        sqlite3_close(s->db);
        if (s->lock >= 0) {
            close(s->lock); /* last: closing any descriptor of the file drops SQLite's own locks on it */
        }
        free(s->path);
        free(s);
    }
}

/* ---- JSON in and out ---- */

static acr_status dump(json_t *json, char **out)
{
    *out = json_dumps(json, JSON_COMPACT | JSON_SORT_KEYS);
    return *out ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for JSON");
}

static acr_status parse(const store *s, const char *text, json_t **out)
{
    json_error_t error;
    *out = text ? json_loads(text, JSON_DECODE_ANY, &error) : json_null();
    return *out ? ACR_OK : acr__fail(ACR_FORMAT, "%s: malformed JSON in it: %s", s->path, error.text);
}

/* A row of now and a value: the two parameters of the statement. */
static acr_status insert_now(store *s, const char *statement, json_t *value)
{
    char *text = NULL, date[24];
    date_text(date);
    acr_status status = dump(value, &text);
    if (status == ACR_OK) {
        status = execute(s, statement, "tt", date, text);
    }
    free(text);
    return status;
}

acr_status store_set_run(store *s, json_t *run)
{
    return insert_now(s, "INSERT INTO run (id, created, definition) VALUES (1, ?, ?)", run);
}

acr_status store_run(store *s, json_t **out)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement, "SELECT definition FROM run", "");
    if (status != ACR_OK) {
        return status;
    }
    if (next_row(s, statement, &status)) {
        status = parse(s, column_text(statement, 0), out);
    } else if (status == ACR_OK) {
        status = acr__fail(ACR_FORMAT, "%s: a store without a run: it was cut short as it began; delete it", s->path);
    }
    sqlite3_finalize(statement);
    return status;
}

/* ---- Results ---- */

/* Where a result's details belong. */
typedef struct place {
    store *store;
    const char *phase;
    int64_t trial; /* or the slice */
} place;

static acr_status write_cases(const place *p, const trial_result *r)
{
    acr_status status = ACR_OK;
    for (size_t i = 0; i < r->case_count && status == ACR_OK; ++i) {
        const trial_case *c = &r->cases[i];
        char seed[24];
        snprintf(seed, sizeof seed, "%llu", (unsigned long long)c->seed);
        status = execute(p->store, "INSERT INTO checked VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", "tiitttiinnnnnn",
                         p->phase, p->trial, (int64_t)i, c->problem, c->inputs, seed, (int64_t)c->hidden,
                         (int64_t)c->pass, c->err_max, c->err_rms, c->err_lse, c->tol_max, c->tol_rms, c->tol_lse);
    }
    return status;
}

static acr_status write_timings(const place *p, const trial_result *r)
{
    acr_status status = ACR_OK;
    for (size_t i = 0; i < r->timing_count && status == ACR_OK; ++i) {
        const trial_timing *t = &r->timings[i];
        const stats_comparison *c = &t->comparison;
        size_t bytes = t->samples * sizeof(double);
        status =
            execute(p->store, "INSERT INTO timing VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                    "tiitnnnnnnnnnnntibb", p->phase, p->trial, (int64_t)i, t->problem, t->weight, t->floor_us,
                    t->incumbent.p50, t->candidate.p50, t->candidate.p50_ci95.low, t->candidate.p50_ci95.high,
                    t->candidate.mad, c->speedup, c->ci95.low, c->ci95.high, c->noise_floor,
                    stats_verdict_text(c->verdict), (int64_t)c->blocks, t->incumbent_us, bytes, t->candidate_us, bytes);
    }
    return status;
}

static acr_status write_details(const place *p, const trial_result *r)
{
    acr_status status = write_cases(p, r);
    if (status == ACR_OK) {
        status = write_timings(p, r);
    }
    for (int gate = 0; gate < GATE_COUNT && status == ACR_OK; ++gate) {
        if (r->gate_s[gate] > 0.0) {
            status = execute(p->store, "INSERT INTO gate_time VALUES (?,?,?,?)", "titn", p->phase, p->trial,
                             trial_gate_name((trial_gate)gate), r->gate_s[gate]);
        }
    }
    return status;
}

/* X(column name, field): one list for writing and reading. */
#define RESOURCES(X)                                                                                                   \
    X("registers", registers)                                                                                          \
    X("smem_bytes", smem_bytes)                                                                                        \
    X("spill_bytes", spill_bytes)                                                                                      \
    X("stack_bytes", stack_bytes)                                                                                      \
    X("code_bytes", code_bytes)                                                                                        \
    X("ctas_per_sm", ctas_per_sm)

static acr_status write_resources(store *s, int64_t trial, const trial_resources *r)
{
    const struct {
        const char *name;
        int64_t value;
    } values[] = {
#define X(name, field) {name, r->field},
        RESOURCES(X)
#undef X
    };
    acr_status status = ACR_OK;
    for (size_t i = 0; i < sizeof values / sizeof values[0] && status == ACR_OK; ++i) {
        if (values[i].value >= 0) {
            status = execute(s, "INSERT INTO resource VALUES (?,?,?)", "iti", trial, values[i].name, values[i].value);
        }
    }
    return status;
}

/* ---- Slices ---- */

acr_status store_begin_slice(store *s, json_t *environment, int64_t *id)
{
    const acr_status status = insert_now(s, "INSERT INTO slice (started, environment) VALUES (?, ?)", environment);
    *id = sqlite3_last_insert_rowid(s->db);
    return status;
}

static acr_status write_control(store *s, int64_t slice, int device, const trial_result *control)
{
    char phase[32] = "control";
    if (device > 0) {
        snprintf(phase, sizeof phase, "control %d", device);
    }
    const double noise_floor = control->overall.noise_floor;
    const char *verdict = stats_verdict_text(control->overall.verdict);
    const place p = {s, phase, slice};
    acr_status status = write_details(&p, control);
    if (status == ACR_OK) {
        status = execute(s, "INSERT INTO slice_device VALUES (?,?,?,?)", "iint", slice, (int64_t)device, noise_floor,
                         verdict);
    }
    return status == ACR_OK && device == 0
               ? execute(s, "UPDATE slice SET noise_floor = ?, control_verdict = ? WHERE id = ?", "nti", noise_floor,
                         verdict, slice)
               : status;
}

acr_status store_slice_control(store *s, int64_t slice, int device, const trial_result *control)
{
    acr_status status = begin(s);
    return status == ACR_OK ? end(s, write_control(s, slice, device, control)) : status;
}

acr_status store_slice_peers(store *s, int64_t slice, json_t *records)
{
    char *text = NULL;
    acr_status status = dump(records, &text);
    if (status == ACR_OK) {
        status = execute(s, "UPDATE slice SET peers = ? WHERE id = ?", "ti", text, slice);
    }
    free(text);
    return status;
}

acr_status store_end_slice(store *s, int64_t slice, const char *reason)
{
    char date[24];
    date_text(date);
    return execute(s, "UPDATE slice SET ended = ?, reason = ? WHERE id = ?", "tti", date, reason, slice);
}

/* ---- Trials ---- */

const char *trial_arm_name(trial_arm arm)
{
    return arm == ARM_CONTROL ? "control" : "search";
}

/* Keeps a text once, by its digest; digest "" for NULL. */
static acr_status put_text(store *s, const char *text, char digest[STORE_DIGEST_MAX])
{
    digest[0] = '\0';
    if (!text) {
        return ACR_OK;
    }
    size_t size = strlen(text);
    XXH128_hash_t hash = XXH3_128bits(text, size);
    snprintf(digest, STORE_DIGEST_MAX, "%016llx%016llx", (unsigned long long)hash.high64,
             (unsigned long long)hash.low64);
    return execute(s, "INSERT OR IGNORE INTO blob VALUES (?, ?)", "tb", digest, text, size);
}

static const char *or_null(const char *text)
{
    return *text ? text : NULL;
}

static acr_status write_proposal(store *s, int64_t slice, const trial_row *row, const char *date)
{
    char source[STORE_DIGEST_MAX], request[STORE_DIGEST_MAX], answer[STORE_DIGEST_MAX];
    acr_status status = put_text(s, row->source, source);
    if (status == ACR_OK) {
        status = put_text(s, row->request, request);
    }
    if (status == ACR_OK) {
        status = put_text(s, row->answer, answer);
    }
    if (status == ACR_OK) {
        status = execute(s,
                         "INSERT INTO trial (id, arm, number, round, operation, kernel, family, arch, parameters, cell,"
                         " source, descriptor, rationale, request, answer, proposed_in, proposed_at)"
                         " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                         "itiittttttttttt"
                         "it",
                         row->id, trial_arm_name(row->arm), row->number, row->round, row->operation, row->kernel,
                         row->family, row->arch, row->parameters, row->cell, or_null(source), row->descriptor,
                         row->rationale, or_null(request), or_null(answer), slice, date);
    }
    for (int i = 0; i < row->parent_count && status == ACR_OK; ++i) {
        status = execute(s, "INSERT INTO parent VALUES (?,?,?)", "iii", row->id, (int64_t)i, row->parents[i]);
    }
    return status;
}

acr_status store_propose(store *s, int64_t slice, const trial_row *rows, size_t count)
{
    char date[24];
    date_text(date);
    acr_status status = begin(s);
    if (status != ACR_OK) {
        return status;
    }
    for (size_t i = 0; i < count && status == ACR_OK; ++i) {
        status = write_proposal(s, slice, &rows[i], date);
    }
    return end(s, status);
}

static acr_status write_end(store *s, int64_t slice, const trial_end *e)
{
    char date[24];
    date_text(date);
    const trial_result *r = e->result;
    const stats_comparison none = {NAN, {NAN, NAN}, NAN, STATS_AMBIGUOUS, 0}, *c = r ? &r->overall : &none;
    bool timed = isfinite(c->speedup);
    acr_status status =
        execute(s,
                "UPDATE trial SET finished_in=?, finished_at=?, wall_s=?, status=?, gate=?, detail=?, identity=?,"
                " original=?, is_distinct=?, is_improved=?, speedup=?, speedup_low=?, speedup_high=?, noise_floor=?,"
                " verdict=? WHERE id=? AND status IS NULL",
                "itnttttiiinnnnti", slice, date, e->wall_s, e->status, r ? trial_gate_name(r->gate) : NULL, e->detail,
                r ? or_null(r->identity) : NULL, e->original, (int64_t)e->distinct, (int64_t)e->improved,
                timed ? c->speedup : NAN, timed ? c->ci95.low : NAN, timed ? c->ci95.high : NAN,
                timed ? c->noise_floor : NAN, timed ? stats_verdict_text(c->verdict) : NULL, e->id);
    if (status == ACR_OK && sqlite3_changes(s->db) != 1) {
        status = acr__fail(ACR_INVALID, "trial %lld is not in flight", (long long)e->id);
    }
    if (status == ACR_OK && e->original < 0) {
        status = execute(s, "UPDATE trial SET original = NULL WHERE id = ?", "i", e->id);
    }
    if (status == ACR_OK && e->device >= 0) {
        status = execute(s, "UPDATE trial SET device = ? WHERE id = ?", "ii", (int64_t)e->device, e->id);
    }
    if (status == ACR_OK && r) {
        const place p = {s, "search", e->id};
        status = write_details(&p, r);
    }
    return status == ACR_OK && r ? write_resources(s, e->id, &r->resources) : status;
}

acr_status store_finish(store *s, int64_t slice, const trial_end *e)
{
    acr_status status = begin(s);
    return status == ACR_OK ? end(s, write_end(s, slice, e)) : status;
}

acr_status store_failure(store *s, int64_t slice, const trial_row *row, const trial_end *e)
{
    char date[24];
    date_text(date);
    acr_status status = begin(s);
    if (status != ACR_OK) {
        return status;
    }
    status = write_proposal(s, slice, row, date);
    return end(s, status == ACR_OK ? write_end(s, slice, e) : status);
}

static acr_status write_confirmation(store *s, int64_t slice, int64_t trial, int round, const trial_result *r)
{
    char date[24], phase[32];
    date_text(date);
    snprintf(phase, sizeof phase, "confirm %d", round);
    const stats_comparison *c = &r->overall;
    bool timed = isfinite(c->speedup);
    acr_status status =
        execute(s, "INSERT INTO confirmation VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", "iiittttnnnnt", trial, (int64_t)round,
                slice, date, trial_status_name(r->status), trial_gate_name(r->gate), r->detail,
                timed ? c->speedup : NAN, timed ? c->ci95.low : NAN, timed ? c->ci95.high : NAN,
                timed ? c->noise_floor : NAN, timed ? stats_verdict_text(c->verdict) : NULL);
    const place p = {s, phase, trial};
    return status == ACR_OK ? write_details(&p, r) : status;
}

acr_status store_confirm(store *s, int64_t slice, int64_t trial, int round, const trial_result *result)
{
    acr_status status = begin(s);
    return status == ACR_OK ? end(s, write_confirmation(s, slice, trial, round, result)) : status;
}

acr_status store_confirmation_count(store *s, int *out)
{
    int64_t count = 0;
    acr_status status = query_int(s, "SELECT coalesce(max(round) + 1, 0) FROM confirmation", &count);
    *out = (int)count;
    return status;
}

/* ---- Profiles ---- */

static acr_status write_counter(store *s, const store_profile_row *row, const char *name, double value,
                                const char *unit)
{
    return isnan(value) ? ACR_OK
                        : execute(s, "INSERT INTO profile VALUES (?,?,?,?,?)", "iitnt", row->trial, row->ordinal, name,
                                  value, unit);
}

static acr_status write_counters(store *s, const store_profile_row *row)
{
    const profile_counters *c = &row->run->counters;
    acr_status status = ACR_OK;
    for (int i = 0; i < COUNTER_COUNT && status == ACR_OK; ++i) {
        status = write_counter(s, row, counter_infos[i].key, c->value[i], counter_infos[i].unit);
    }
    for (int i = 0; i < STALL_COUNT && status == ACR_OK; ++i) {
        char name[64];
        snprintf(name, sizeof name, "stall_%s", stall_infos[i].reason);
        status = write_counter(s, row, name, c->stall[i], "warps");
    }
    return status;
}

static acr_status write_profile(store *s, int64_t slice, const store_profile_row *row)
{
    char date[24];
    date_text(date);
    acr_status status =
        execute(s, "DELETE FROM profile WHERE trial = ? AND ordinal = ?", "ii", row->trial, row->ordinal);
    if (status == ACR_OK) {
        status = execute(s, "INSERT OR REPLACE INTO profiled VALUES (?,?,?,?,?,?,?,?,?)", "iitttttit", row->trial,
                         row->ordinal, row->problem, profile_status_name(row->run->status), row->run->detail,
                         row->run->tool, row->diagnosis, slice, date);
    }
    return status == ACR_OK && row->run->status == PROFILE_OK ? write_counters(s, row) : status;
}

acr_status store_profile(store *s, int64_t slice, const store_profile_row *row)
{
    acr_status status = begin(s);
    return status == ACR_OK ? end(s, write_profile(s, slice, row)) : status;
}

acr_status store_is_profiled(store *s, int64_t trial, bool *out)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement, "SELECT status FROM profiled WHERE trial = ?", "i", trial);
    if (status != ACR_OK) {
        return status;
    }
    bool any = false, machines = false;
    while (next_row(s, statement, &status)) {
        any = true;
        for (int i = 0; i < PROFILE_STATUS_COUNT; ++i) {
            bool same = strcmp(profile_status_name((profile_status)i), column_text(statement, 0)) == 0;
            machines = machines || (same && profile_status_is_machines((profile_status)i));
        }
    }
    sqlite3_finalize(statement);
    *out = any && !machines;
    return status;
}

/* ---- Reading trials ---- */

static stats_verdict parse_verdict(const char *text)
{
    for (int v = STATS_SAME; text && v <= STATS_AMBIGUOUS; ++v) {
        if (strcmp(stats_verdict_text((stats_verdict)v), text) == 0) {
            return (stats_verdict)v;
        }
    }
    return STATS_AMBIGUOUS;
}

static acr_status read_parents(store *s, trial_row *row)
{
    sqlite3_stmt *statement = NULL;
    acr_status status =
        prepare(s, &statement, "SELECT parent FROM parent WHERE trial = ? ORDER BY ordinal", "i", row->id);
    if (status != ACR_OK) {
        return status;
    }
    row->parent_count = 0;
    while (row->parent_count < 2 && next_row(s, statement, &status)) {
        row->parents[row->parent_count++] = sqlite3_column_int64(statement, 0);
    }
    sqlite3_finalize(statement);
    return status;
}

static acr_status read_resources(store *s, int64_t trial, trial_resources *out)
{
    *out = (trial_resources){-1, -1, -1, -1, -1, -1};
    struct {
        const char *name;
        int64_t *value;
    } values[] = {
#define X(name, field) {name, &out->field},
        RESOURCES(X)
#undef X
    };
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement, "SELECT name, value FROM resource WHERE trial = ?", "i", trial);
    if (status != ACR_OK) {
        return status;
    }
    while (next_row(s, statement, &status)) {
        for (size_t i = 0; i < sizeof values / sizeof values[0]; ++i) {
            if (strcmp(values[i].name, column_text(statement, 0)) == 0) {
                *values[i].value = sqlite3_column_int64(statement, 1);
            }
        }
    }
    sqlite3_finalize(statement);
    return status;
}

static acr_status read_confirmations(store *s, trial_view *v)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement,
                                "SELECT status, verdict, speedup, speedup_low, speedup_high FROM confirmation"
                                " WHERE trial = ? ORDER BY round",
                                "i", v->row.id);
    if (status != ACR_OK) {
        return status;
    }
    v->confirmed_speedup = v->confirmed_low = v->confirmed_high = NAN;
    while (next_row(s, statement, &status)) {
        ++v->confirmations;
        v->confirmed = strcmp(column_text(statement, 0), trial_status_name(TRIAL_VALID)) == 0 &&
                       parse_verdict(column_text(statement, 1)) == STATS_FASTER;
        v->confirmed_speedup = column_number(statement, 2);
        v->confirmed_low = column_number(statement, 3);
        v->confirmed_high = column_number(statement, 4);
    }
    sqlite3_finalize(statement);
    return status;
}

static const char trial_columns[] =
    "SELECT id, arm, number, round, operation, kernel, family, arch, parameters, cell, descriptor, rationale,"
    " status, gate, detail, identity, original, is_distinct, is_improved, speedup, speedup_low, speedup_high,"
    " noise_floor, verdict, (SELECT bytes FROM blob WHERE digest = trial.source) FROM trial ORDER BY id";

static acr_status read_view(store *s, sqlite3_stmt *statement, trial_view *v)
{
    *v = (trial_view){
        .row = {.id = sqlite3_column_int64(statement, 0),
                .arm = strcmp(column_text(statement, 1), trial_arm_name(ARM_CONTROL)) == 0 ? ARM_CONTROL : ARM_SEARCH,
                .number = sqlite3_column_int64(statement, 2),
                .round = sqlite3_column_int64(statement, 3),
                .operation = column_text(statement, 4),
                .kernel = column_text(statement, 5),
                .family = column_text(statement, 6),
                .arch = column_text(statement, 7),
                .parameters = column_text(statement, 8),
                .cell = column_text(statement, 9),
                .descriptor = column_text(statement, 10),
                .rationale = column_text(statement, 11),
                .source = column_text(statement, 24)},
        .status = column_text(statement, 12),
        .gate = column_text(statement, 13),
        .detail = column_text(statement, 14),
        .identity = column_text(statement, 15),
        .original = sqlite3_column_type(statement, 16) == SQLITE_NULL ? -1 : sqlite3_column_int64(statement, 16),
        .distinct = sqlite3_column_int(statement, 17) != 0,
        .improved = sqlite3_column_int(statement, 18) != 0,
        .speedup = column_number(statement, 19),
        .low = column_number(statement, 20),
        .high = column_number(statement, 21),
        .noise_floor = column_number(statement, 22),
        .verdict = parse_verdict(column_text(statement, 23)),
    };
    v->finished = v->status != NULL;
    acr_status status = read_parents(s, &v->row);
    if (status == ACR_OK) {
        status = read_resources(s, v->row.id, &v->resources);
    }
    return status == ACR_OK ? read_confirmations(s, v) : status;
}

acr_status store_trials(store *s, store_visit *visit, void *arg)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement, trial_columns, "");
    if (status != ACR_OK) {
        return status;
    }
    while (next_row(s, statement, &status)) {
        trial_view v;
        status = read_view(s, statement, &v);
        if (status != ACR_OK || !visit(arg, &v)) {
            break;
        }
    }
    sqlite3_finalize(statement);
    return status;
}

/* ---- Reading as JSON ---- */

/* A column as JSON, by its type; bytes, which only timings have, as an array of numbers. */
static json_t *column_json(sqlite3_stmt *statement, int column)
{
    switch (sqlite3_column_type(statement, column)) {
    case SQLITE_INTEGER:
        return json_integer(sqlite3_column_int64(statement, column));
    case SQLITE_FLOAT: {
        double value = sqlite3_column_double(statement, column);
        return isfinite(value) ? json_real(value) : json_null();
    }
    case SQLITE_TEXT:
        return json_string(column_text(statement, column));
    case SQLITE_BLOB: {
        json_t *array = json_array();
        const char *bytes = sqlite3_column_blob(statement, column);
        for (int at = 0; at < sqlite3_column_bytes(statement, column); at += (int)sizeof(double)) {
            double value = 0;
            memcpy(&value, bytes + at, sizeof value);
            json_array_append_new(array, json_real(value));
        }
        return array;
    }
    default:
        return json_null();
    }
}

/* The rows of a query with one integer argument, as objects named by its columns. */
static acr_status rows_json(store *s, const char *sql, int64_t argument, json_t **out)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(s, &statement, sql, "i", argument);
    if (status != ACR_OK) {
        return status;
    }
    json_t *rows = json_array();
    while (next_row(s, statement, &status)) {
        json_t *row = json_object();
        for (int i = 0; i < sqlite3_column_count(statement); ++i) {
            json_object_set_new(row, sqlite3_column_name(statement, i), column_json(statement, i));
        }
        json_array_append_new(rows, row);
    }
    sqlite3_finalize(statement);
    *out = rows;
    return status;
}

acr_status store_profile_json(store *s, int64_t trial, json_t **out)
{
    json_t *rows = NULL, *counters = NULL;
    acr_status status = rows_json(s,
                                  "SELECT ordinal, problem, status, detail, tool, diagnosis FROM profiled"
                                  " WHERE trial = ? ORDER BY ordinal",
                                  trial, &rows);
    if (status == ACR_OK) {
        status = rows_json(s, "SELECT ordinal, name, value FROM profile WHERE trial = ? ORDER BY ordinal, name", trial,
                           &counters);
    }
    for (size_t i = 0; i < json_array_size(rows) && status == ACR_OK; ++i) {
        json_t *row = json_array_get(rows, i), *named = json_object();
        for (size_t k = 0; k < json_array_size(counters); ++k) {
            const json_t *counter = json_array_get(counters, k);
            if (json_equal(json_object_get(counter, "ordinal"), json_object_get(row, "ordinal"))) {
                json_object_set(named, json_string_value(json_object_get(counter, "name")),
                                json_object_get(counter, "value"));
            }
        }
        json_object_del(row, "ordinal");
        json_object_set_new(row, "counters", named);
    }
    json_decref(counters);
    if (status != ACR_OK) {
        json_decref(rows);
        return status;
    }
    *out = rows;
    return ACR_OK;
}

acr_status store_trial_json(store *s, int64_t id, bool samples, json_t **out)
{
    static const char timings[] =
        "SELECT phase, problem, weight, floor_us, incumbent_p50_us, candidate_p50_us, candidate_low_us,"
        " candidate_high_us, candidate_mad_us, speedup, speedup_low, speedup_high, noise_floor, verdict, blocks"
        " FROM timing WHERE trial = ? AND phase NOT LIKE 'control%' ORDER BY phase DESC, ordinal";
    const struct {
        const char *name, *sql;
    } parts[] = {
        {"parents", "SELECT parent FROM parent WHERE trial = ? ORDER BY ordinal"},
        {"resources", "SELECT name, value FROM resource WHERE trial = ? ORDER BY name"},
        {"cases", "SELECT * FROM checked WHERE trial = ? AND phase NOT LIKE 'control%' ORDER BY phase DESC, ordinal"},
        {"timings",
         samples ? "SELECT * FROM timing WHERE trial = ? AND phase NOT LIKE 'control%' ORDER BY phase DESC, ordinal"
                 : timings},
        {"gate_times", "SELECT phase, gate, seconds FROM gate_time WHERE trial = ? AND phase NOT LIKE 'control%'"},
        {"confirmations", "SELECT * FROM confirmation WHERE trial = ? ORDER BY round"},
    };
    json_t *rows = NULL;
    acr_status status = rows_json(s,
                                  "SELECT trial.*, CAST(q.bytes AS TEXT) AS request_text,"
                                  " CAST(a.bytes AS TEXT) AS answer_text, CAST(c.bytes AS TEXT) AS source_text"
                                  " FROM trial LEFT JOIN blob q ON q.digest = request LEFT JOIN blob a ON a.digest ="
                                  " answer LEFT JOIN blob c ON c.digest = source WHERE id = ?",
                                  id, &rows);
    json_t *trial = status == ACR_OK ? json_incref(json_array_get(rows, 0)) : NULL;
    json_decref(rows);
    if (status == ACR_OK && !trial) {
        return acr__fail(ACR_INVALID, "%s: no trial %lld", s->path, (long long)id);
    }
    for (size_t i = 0; i < sizeof parts / sizeof parts[0] && status == ACR_OK; ++i) {
        json_t *part = NULL;
        status = rows_json(s, parts[i].sql, id, &part);
        json_object_set_new(trial, parts[i].name, part);
    }
    if (status == ACR_OK) {
        json_t *profile = NULL;
        status = store_profile_json(s, id, &profile);
        json_object_set_new(trial, "profile", profile);
    }
    if (status != ACR_OK) {
        json_decref(trial);
        return status;
    }
    *out = trial;
    return ACR_OK;
}

acr_status store_trial_source(store *s, int64_t id, char **out)
{
    sqlite3_stmt *statement = NULL;
    acr_status status = prepare(
        s, &statement, "SELECT (SELECT bytes FROM blob WHERE digest = trial.source) FROM trial WHERE id = ?", "i", id);
    if (status != ACR_OK) {
        return status;
    }
    *out = NULL;
    if (next_row(s, statement, &status)) {
        const char *text = column_text(statement, 0);
        *out = text ? strdup(text) : NULL;
        status = text && !*out ? acr__fail(ACR_NO_MEMORY, "no memory for a source") : status;
    } else if (status == ACR_OK) {
        status = acr__fail(ACR_INVALID, "%s: no trial %lld", s->path, (long long)id);
    }
    sqlite3_finalize(statement);
    return status;
}

/* Parses a text member in place. */
static acr_status parse_member(store *s, json_t *object, const char *name)
{
    json_t *parsed = NULL;
    acr_status status = parse(s, json_string_value(json_object_get(object, name)), &parsed);
    return status == ACR_OK && json_object_set_new(object, name, parsed) != 0
               ? acr__fail(ACR_NO_MEMORY, "no memory for JSON")
               : status;
}

acr_status store_slices(store *s, json_t **out)
{
    json_t *slices = NULL;
    acr_status status = rows_json(s, "SELECT * FROM slice WHERE ? ORDER BY id", 1, &slices);
    for (size_t i = 0; i < json_array_size(slices) && status == ACR_OK; ++i) {
        json_t *slice = json_array_get(slices, i), *control = NULL;
        status = parse_member(s, slice, "environment");
        if (status == ACR_OK) {
            status = parse_member(s, slice, "peers");
        }
        if (status == ACR_OK) {
            status = rows_json(s,
                               "SELECT problem, weight, floor_us, incumbent_p50_us, candidate_p50_us, speedup,"
                               " speedup_low, speedup_high, noise_floor, verdict, blocks FROM timing"
                               " WHERE trial = ? AND phase = 'control' ORDER BY ordinal",
                               json_integer_value(json_object_get(slice, "id")), &control);
            json_object_set_new(slice, "control", control);
        }
        if (status == ACR_OK) {
            json_t *devices = NULL;
            status = rows_json(s,
                               "SELECT device, noise_floor, control_verdict FROM slice_device WHERE slice = ?"
                               " ORDER BY device",
                               json_integer_value(json_object_get(slice, "id")), &devices);
            json_object_set_new(slice, "devices", devices);
        }
    }
    if (status != ACR_OK) {
        json_decref(slices);
        return status;
    }
    *out = slices;
    return ACR_OK;
}
