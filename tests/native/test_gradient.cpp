// Are gradients stored, added and measured as defined, with the same bits however the work is shared?

#include <errno.h>
#include <math.h>
#include <string.h>
#include <vector>

#include "check.h"
#include "dtype.h"
#include "tiermem.h"

static const uint64_t N = 2 * TM_NORM_BLOCK + 4321;

static std::vector<char> make(int dtype, uint64_t seed) {
    Numbers numbers{seed};
    std::vector<float> values(N + 1);
    for (float &value : values)
        value = numbers.uniform() * 3;
    std::vector<char> data((N + 1) * 4);
    tm_dtype_narrow(&tm_loops_plain, dtype, N + 1, values.data(), data.data());
    return data;
}

static std::vector<float> as_floats(const std::vector<char> &data, int dtype) {
    std::vector<float> values(N + 1);
    tm_dtype_widen(&tm_loops_plain, dtype, N + 1, data.data(), values.data());
    return values;
}

// The definition: 16 lanes by element offset within the parameter, added in order.
static std::vector<double> sums_reference(const float *x, uint64_t first_element) {
    std::vector<double> sums;
    for (uint64_t i = 0; i < N;) {
        double lanes[16] = {0};
        const uint64_t block = (first_element + i) / TM_NORM_BLOCK;
        for (; i < N && (first_element + i) / TM_NORM_BLOCK == block; ++i)
            lanes[(first_element + i) % 16] += (double)x[i] * (double)x[i];
        double sum = 0;
        for (double lane : lanes)
            sum += lane;
        sums.push_back(sum);
    }
    return sums;
}

static void stored_and_measured_as_defined(int dst_dtype, int src_dtype, bool is_added, uint64_t first_element) {
    const std::vector<char> src = make(src_dtype, 21), before = make(dst_dtype, 22);
    std::vector<float> wanted = as_floats(src, src_dtype);
    const std::vector<float> held = as_floats(before, dst_dtype);
    for (uint64_t i = 0; i <= N && is_added; ++i)
        wanted[i] = held[i] + wanted[i];
    std::vector<char> stored((N + 1) * 4);
    tm_dtype_narrow(&tm_loops_plain, dst_dtype, N + 1, wanted.data(), stored.data());
    wanted = as_floats(stored, dst_dtype);
    const std::vector<double> wanted_sums = sums_reference(&wanted[1], first_element);
    for (int isa = 0; isa < 3; ++isa)
        for (uint32_t num_threads : {1u, 3u}) {
            if (tm_isa_choose(isa) < 0)
                continue;
            tm_workers *workers;
            CHECK_EQUAL(tm_workers_open(num_threads, &workers), 0);
            std::vector<char> dst = before;
            std::vector<double> sums(wanted_sums.size() + 1, -1);
            CHECK_EQUAL(tm_gradient_store(workers, N, tm_dtype_at(dst.data(), dst_dtype, 1), dst_dtype,
                                          tm_dtype_at(src.data(), src_dtype, 1), src_dtype, is_added, first_element,
                                          sums.data()),
                        0);
            CHECK_EQUAL(tm_workers_close(workers), 0);
            const std::vector<float> seen = as_floats(dst, dst_dtype);
            CHECK(memcmp(&seen[1], &wanted[1], N * sizeof(float)) == 0);
            CHECK(memcmp(&seen[0], &held[0], sizeof(float)) == 0);
            CHECK(memcmp(sums.data(), wanted_sums.data(), wanted_sums.size() * sizeof(double)) == 0);
            CHECK(sums.back() == -1);
        }
}

static void without_dst_it_measures_src(int src_dtype) {
    const std::vector<char> src = make(src_dtype, 23);
    const std::vector<float> x = as_floats(src, src_dtype);
    std::vector<double> sums(4), wanted = sums_reference(x.data(), 0);
    CHECK_EQUAL(tm_gradient_store(nullptr, N, nullptr, TM_NONE, src.data(), src_dtype, 0, 0, sums.data()), 0);
    CHECK(memcmp(sums.data(), wanted.data(), wanted.size() * sizeof(double)) == 0);
}

static void source_and_destination_may_be_the_same(int dtype) {
    std::vector<char> data = make(dtype, 24);
    const std::vector<char> before = data;
    std::vector<double> sums(4), wanted(4);
    CHECK_EQUAL(tm_gradient_store(nullptr, N, nullptr, TM_NONE, before.data(), dtype, 0, 0, wanted.data()), 0);
    CHECK_EQUAL(tm_gradient_store(nullptr, N, data.data(), dtype, data.data(), dtype, 0, 0, sums.data()), 0);
    CHECK(data == before && sums == wanted);
}

static void a_sum_is_finite_exactly_when_every_element_is(float bad) {
    std::vector<float> x(N, 3.4e38f);
    std::vector<double> sums(3);
    CHECK_EQUAL(tm_gradient_store(nullptr, N, nullptr, TM_NONE, x.data(), TM_F32, 0, 0, sums.data()), 0);
    for (double sum : sums)
        CHECK(isfinite(sum));
    x[TM_NORM_BLOCK + 17] = bad;
    CHECK_EQUAL(tm_gradient_store(nullptr, N, nullptr, TM_NONE, x.data(), TM_F32, 0, 0, sums.data()), 0);
    CHECK(isfinite(sums[0]) && !isfinite(sums[1]) && isfinite(sums[2]));
}

static void bad_arguments_are_refused() {
    float x[4] = {0};
    double sum;
    CHECK_EQUAL(tm_gradient_store(nullptr, 4, x, TM_F32, nullptr, TM_F32, 0, 0, &sum), -EINVAL);
    CHECK_EQUAL(tm_gradient_store(nullptr, 4, x, 9, x, TM_F32, 0, 0, &sum), -EINVAL);
    CHECK_EQUAL(tm_gradient_store(nullptr, 4, x, TM_F32, x, TM_NONE, 0, 0, &sum), -EINVAL);
    CHECK_EQUAL(tm_gradient_store(nullptr, 4, nullptr, TM_F32, x, TM_F32, 1, 0, &sum), -EINVAL);
    CHECK_EQUAL(tm_gradient_store(nullptr, 4, x, TM_F32, x, TM_F32, 0, UINT64_MAX, &sum), -EINVAL);
    CHECK_EQUAL(tm_gradient_store(nullptr, 0, x, TM_F32, x, TM_F32, 0, 0, &sum), 0);
    CHECK_EQUAL(tm_gradient_store(nullptr, 4, x, TM_F32, x, TM_F32, 0, 0, nullptr), 0);
}

int main() {
    for (int dst : {TM_F32, TM_BF16, TM_F16})
        for (int src : {TM_F32, TM_BF16, TM_F16})
            for (bool is_added : {false, true})
                for (uint64_t first : {0ull, 7ull, 65530ull, 1000003ull})
                    RUN(stored_and_measured_as_defined, dst, src, is_added, first);
    for (int dtype : {TM_F32, TM_BF16, TM_F16}) {
        RUN(without_dst_it_measures_src, dtype);
        RUN(source_and_destination_may_be_the_same, dtype);
    }
    RUN(a_sum_is_finite_exactly_when_every_element_is, NAN);
    RUN(a_sum_is_finite_exactly_when_every_element_is, INFINITY);
    RUN(bad_arguments_are_refused);
}
