/* Answers of external proposers, see answers.h. */
#include "answers.h"

#include <stdlib.h>
#include <string.h>

const char *answers_text(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text ? text : "";
}

static bool add_id(void *arg, const trial_view *v)
{
    const bool external = strcmp(v->row.operation, "external") == 0 || strcmp(v->row.operation, "folder") == 0;
    return !external || json_array_append_new(arg, json_integer(v->row.id)) == 0;
}

acr_status answers_each(store *s, answers_visit *visit, void *arg)
{
    json_t *ids = json_array();
    acr_status status = store_trials(s, add_id, ids);
    bool more = true;
    for (size_t i = 0; i < json_array_size(ids) && more && status == ACR_OK; ++i) {
        json_t *trial = NULL;
        status = store_trial_json(s, json_integer_value(json_array_get(ids, i)), false, &trial);
        json_t *answer = status == ACR_OK ? json_loads(answers_text(trial, "answer_text"), 0, NULL) : NULL;
        if (json_is_object(answer)) {
            more = visit(arg, trial, answer);
        }
        json_decref(answer);
        json_decref(trial);
    }
    json_decref(ids);
    return status;
}
