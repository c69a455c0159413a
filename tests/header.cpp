/* The public header in C++, under warnings that are strict there: see tests/CMakeLists.txt. */
#include "acromion.h"

int main()
{
    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    acr_problem problem = ACR_PROBLEM_INIT;
    acr_buffers buffers = ACR_BUFFERS_INIT;
    acr_wisdom_report report = ACR_WISDOM_REPORT_INIT;
    return options.size == sizeof options && problem.size == sizeof problem && buffers.size == sizeof buffers &&
                   report.size == sizeof report
               ? 0
               : 1;
}
