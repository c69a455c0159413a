// Plans from C++: the explicit calls (plan, workspace, execute) under std::unique_ptr, with grouped-query bfloat16
// heads, padded batches and the log-sum-exp. Runs on the CPU backend, so it needs no GPU.
#include <acromion.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

namespace
{

void require(acr_status status, const char *what)
{
    if (status != ACR_OK)
        throw std::runtime_error(std::string(what) + ": " + acr_last_error());
}

struct destroy {
    void operator()(acr_ctx *ctx) const
    {
        acr_ctx_destroy(ctx);
    }
    void operator()(acr_plan *plan) const
    {
        acr_plan_destroy(plan);
    }
};

// Memory as acromion wants a workspace: aligned to 256 bytes.
std::unique_ptr<void, decltype(&std::free)> aligned_bytes(std::size_t bytes)
{
    const std::size_t rounded = (bytes + 255) / 256 * 256;
    return {rounded ? std::aligned_alloc(256, rounded) : nullptr, &std::free};
}

void run()
{
    // Two padded sequences, eight query heads that share two key/value heads; [batch, length, heads, dim], as inference
    // engines store it.
    acr_problem problem = ACR_PROBLEM_INIT;
    require(acr_problem_parse(&problem, "bf16:b2:h8/2:s32/256:d64:causal:bshd:align2:lse:kvlens", nullptr), "problem");
    require(acr_problem_canonical(&problem, &problem), "problem");

    acr_ctx_options options = ACR_CTX_OPTIONS_INIT;
    options.backend = "cpu";
    acr_ctx *raw_ctx = nullptr;
    require(acr_ctx_create(&raw_ctx, &options), "context");
    const std::unique_ptr<acr_ctx, destroy> ctx(raw_ctx);

    acr_plan *raw_plan = nullptr;
    require(acr_plan_create(&raw_plan, ctx.get(), &problem, ACR_ESTIMATE), "plan");
    const std::unique_ptr<acr_plan, destroy> plan(raw_plan);
    std::printf("%s\n", acr_plan_text(plan.get()));

    const std::size_t workspace_bytes = acr_plan_workspace(plan.get());
    const auto workspace = aligned_bytes(workspace_bytes);
    require(acr_workspace_init(plan.get(), workspace.get(), workspace_bytes, nullptr), "workspace");

    const auto q_rows = static_cast<std::size_t>(problem.batch * problem.q_heads * problem.q_len);
    const auto kv_rows = static_cast<std::size_t>(problem.batch * problem.kv_heads * problem.kv_len);
    const auto dim = static_cast<std::size_t>(problem.qk_dim);
    const std::uint16_t bf16_one = 0x3f80;
    const std::vector<std::uint16_t> q(q_rows * dim, 0), k(kv_rows * dim, 0), v(kv_rows * dim, bf16_one);
    const std::vector<std::int32_t> kv_lens = {256, 100};
    std::vector<std::uint16_t> o(q_rows * dim, 0);
    std::vector<float> lse(q_rows, 0.0f);

    acr_buffers buffers = ACR_BUFFERS_INIT;
    buffers.q = q.data();
    buffers.k = k.data();
    buffers.v = v.data();
    buffers.o = o.data();
    buffers.lse = lse.data();
    buffers.kv_lens = kv_lens.data();
    require(acr_execute(plan.get(), &buffers, workspace.get(), workspace_bytes, nullptr), "execute");

    // All scores are 0: the output is the mean of ones, and the log-sum-exp of the last query the logarithm of its
    // keys' count.
    const double last_lse = lse.back();
    std::printf("o[0] = 0x%04x, last lse = %.4f = ln(%.0f)\n", static_cast<unsigned>(o[0]), last_lse,
                std::exp(last_lse));
    if (o[0] != bf16_one || std::fabs(std::exp(last_lse) - 100.0) > 0.01)
        throw std::runtime_error("wrong result");
}

} // namespace

int main()
{
    try {
        run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
