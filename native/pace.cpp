// pace: tries settings one after the other, and keeps the fastest.

#include "pace.h"

#include <algorithm>

tm_pace::tm_pace(uint64_t least) : limits{least, 4 * least, 8 * least} {}

void tm_pace::moved(uint64_t more_bytes, int64_t now_ns) {
    const int64_t begin_ns = last_ns;
    last_ns = now_ns;
    if (begin_ns == 0)
        return;
    if (bytes >= fill_bytes())
        trial_ns += now_ns - begin_ns;
    bytes += more_bytes;
    if (bytes >= fill_bytes() + trial_bytes())
        end_trial();
}

void tm_pace::end_trial() {
    if (is_trying) {
        times_ns[now][num_tries] = trial_ns;
        try_next();
    } else if (++num_trials == num_kept) {
        begin_trying();
    }
    bytes = 0;
    trial_ns = 0;
}

void tm_pace::begin_trying() {
    num_kept = std::min(2 * num_kept, (int)MOST_KEPT);
    std::fill(is_tried, is_tried + NUM_SETTINGS, true);
    num_tries = now = 0;
    is_trying = true;
}

// After a few tries of each, settings that were never faster than the lowest are tried no more.
void tm_pace::try_next() {
    do
        now = (now + 1) % NUM_SETTINGS;
    while (!is_tried[now]);
    if (now > 0)
        return;
    ++num_tries;
    if (num_tries == FEW_TRIES)
        for (int i = 1; i < NUM_SETTINGS; ++i)
            is_tried[i] = is_ever_faster(i);
    const bool is_one_left = std::count(is_tried, is_tried + NUM_SETTINGS, true) == 1;
    if (!is_one_left && num_tries < NUM_TRIES)
        return;
    now = fastest();
    num_trials = 0;
    is_trying = false;
}

bool tm_pace::is_ever_faster(int setting) const {
    for (int i = 0; i < num_tries; ++i)
        if (times_ns[setting][i] < times_ns[0][i])
            return true;
    return false;
}

// The lowest setting whose median is as short as any, within what disks vary from trial to trial.
int tm_pace::fastest() {
    int64_t medians_ns[NUM_SETTINGS];
    for (int i = 0; i < NUM_SETTINGS; ++i) {
        std::nth_element(times_ns[i], times_ns[i] + num_tries / 2, times_ns[i] + num_tries);
        medians_ns[i] = is_tried[i] ? times_ns[i][num_tries / 2] : INT64_MAX;
    }
    const int64_t best_ns = *std::min_element(medians_ns, medians_ns + NUM_SETTINGS);
    const auto is_as_fast = [&](int64_t median_ns) { return median_ns <= best_ns + best_ns / 16; };
    return (int)(std::find_if(medians_ns, medians_ns + NUM_SETTINGS, is_as_fast) - medians_ns);
}
