// pace: tries limits in turns, and keeps the fastest.

#include "pace.h"

#include <algorithm>

static uint64_t times_four(uint64_t bytes) { return bytes > UINT64_MAX / 4 ? UINT64_MAX : 4 * bytes; }

tm_pace::tm_pace(uint64_t least) : limits{least, times_four(least), UINT64_MAX} {}

void tm_pace::moved(uint64_t more, int64_t now_ns) {
    const int64_t begin_ns = last_ns;
    last_ns = now_ns;
    if (begin_ns == 0)
        return;
    if (bytes >= FILL_BYTES)
        turn_ns += now_ns - begin_ns;
    bytes += more;
    if (bytes >= FILL_BYTES + TURN_BYTES)
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
    times_ns[now][num_turns / NUM_LIMITS] = ended_ns;
    now = ++num_turns % NUM_LIMITS;
    if (num_turns < NUM_LIMITS * NUM_TRIES)
        return;
    now = fastest();
    num_turns = 0;
    is_trying = false;
}

// The lowest limit whose median is as short as any, within what disks vary from turn to turn.
int tm_pace::fastest() {
    int64_t medians_ns[NUM_LIMITS];
    for (int i = 0; i < NUM_LIMITS; ++i) {
        std::nth_element(times_ns[i], times_ns[i] + NUM_TRIES / 2, times_ns[i] + NUM_TRIES);
        medians_ns[i] = times_ns[i][NUM_TRIES / 2];
    }
    const int64_t best_ns = *std::min_element(medians_ns, medians_ns + NUM_LIMITS);
    const auto is_as_fast = [&](int64_t median_ns) { return median_ns <= best_ns + best_ns / 50; };
    return (int)(std::find_if(medians_ns, medians_ns + NUM_LIMITS, is_as_fast) - medians_ns);
}
