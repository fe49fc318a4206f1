// pace: tries settings in turns, and keeps the fastest.

#include "pace.h"

#include <algorithm>

tm_pace::tm_pace(uint64_t least) : limits{least, 4 * least, 8 * least} {}

void tm_pace::moved(uint64_t more, int64_t now_ns) {
    const int64_t begin_ns = last_ns;
    last_ns = now_ns;
    if (begin_ns == 0)
        return;
    if (bytes >= fill_bytes())
        turn_ns += now_ns - begin_ns;
    bytes += more;
    if (bytes >= fill_bytes() + turn_bytes())
        end_turn();
}

void tm_pace::end_turn() {
    const int64_t ended_ns = turn_ns;
    bytes = 0;
    turn_ns = 0;
    if (!is_trying) {
        if (++num_turns < num_kept)
            return;
        num_kept = std::min(2 * num_kept, (int)MOST_KEPT);
        num_turns = now = 0;
        is_trying = true;
        return;
    }
    times_ns[now][num_turns / NUM_SETTINGS] = ended_ns;
    now = ++num_turns % NUM_SETTINGS;
    if (num_turns < NUM_SETTINGS * NUM_TRIES)
        return;
    now = fastest();
    num_turns = 0;
    is_trying = false;
}

// The lowest setting whose median is as short as any, within what disks vary from turn to turn.
int tm_pace::fastest() {
    int64_t medians_ns[NUM_SETTINGS];
    for (int i = 0; i < NUM_SETTINGS; ++i) {
        std::nth_element(times_ns[i], times_ns[i] + NUM_TRIES / 2, times_ns[i] + NUM_TRIES);
        medians_ns[i] = times_ns[i][NUM_TRIES / 2];
    }
    const int64_t best_ns = *std::min_element(medians_ns, medians_ns + NUM_SETTINGS);
    const auto is_as_fast = [&](int64_t median_ns) { return median_ns <= best_ns + best_ns / 50; };
    return (int)(std::find_if(medians_ns, medians_ns + NUM_SETTINGS, is_as_fast) - medians_ns);
}
