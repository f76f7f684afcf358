/* The least that FedDyn, SCAFFOLD and FedDC can cost over FedAvg on W4, where a client makes one step.
 *
 *   cc -O3 -march=native -ffast-math benchmarks/one_loop.c -o /tmp/one_loop && taskset -c 0 /tmp/one_loop
 *
 * Prints microseconds a client of what follows its gradient: the step, the sums, the client's state. "one loop" does all
 * of it in one loop over the parameters, "own loops" has a loop for each result and a copy of each row that is changed,
 * as XLA compiles it. A stand-in for the gradient reads w and writes g, as its two large products do; its time is taken
 * off. Divide a method's excess over FedAvg by the measured time of a client (overhead.md: seconds a round by 500).
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { P = 159010, CLIENTS = 500, TIMES = 15, KINDS = 9 };

#define IN const float *restrict
#define OUT float *restrict
#define LOOP __attribute__((noinline)) static void
#define EACH for (int i = 0; i < P; i++)

static const float lr = 0.01f, decay = 1e-4f, share = 0.002f, alpha = 0.01f;

LOOP gradient(IN w, OUT g, float k) {
    float sum = 0;
    EACH sum += w[i];
    EACH g[i] = k + i * 1e-6f + 1e-20f * sum;
}

LOOP average(IN w, IN g, OUT sum) { EACH sum[i] += share * (w[i] - lr * (g[i] + decay * w[i])); }

LOOP dyn(IN w, IN g, OUT sum, OUT row) {
    EACH {
        float x = w[i] - lr * (g[i] + decay * w[i] - row[i]);
        sum[i] += share * x;
        row[i] -= alpha * (x - w[i]);
    }
}

LOOP scaffold(IN w, IN g, IN c, OUT sum, OUT change, OUT row) {
    EACH {
        float x = w[i] - lr * (g[i] + decay * w[i] - row[i] + c[i]), sent = (w[i] - x) / lr;
        sum[i] += share * x;
        change[i] += share * sent;
        row[i] += sent - c[i];
    }
}

LOOP dc(IN w, IN g, IN c, OUT sum, OUT change, OUT drift, OUT row) {
    EACH {
        float moved = -lr * (g[i] + decay * w[i] + alpha * drift[i] + c[i] - row[i]);
        sum[i] += share * moved;
        change[i] -= share / lr * moved;
        drift[i] += moved;
        row[i] = row[i] - c[i] - moved / lr;
    }
}

LOOP step(IN w, IN g, OUT x) { EACH x[i] = w[i] - lr * (g[i] + decay * w[i]); }
LOOP step_row(IN w, IN g, IN row, OUT x) { EACH x[i] = w[i] - lr * (g[i] + decay * w[i] - row[i]); }
LOOP step_control(IN w, IN g, IN c, IN row, OUT x) { EACH x[i] = w[i] - lr * (g[i] + decay * w[i] - row[i] + c[i]); }
LOOP step_drift(IN w, IN g, IN c, IN drift, IN row, OUT x) {
    EACH x[i] = w[i] - lr * (g[i] + decay * w[i] + alpha * drift[i] + c[i] - row[i]);
}
LOOP add(IN x, float scale, OUT sum) { EACH sum[i] += scale * x[i]; }
LOOP add_moved(IN x, IN w, float scale, OUT sum) { EACH sum[i] += scale * (x[i] - w[i]); }
LOOP new_row(IN x, IN w, IN old, float scale, OUT row) { EACH row[i] = old[i] + scale * (x[i] - w[i]); }
LOOP new_control(IN x, IN w, IN c, IN old, OUT row) { EACH row[i] = old[i] - c[i] - (x[i] - w[i]) / lr; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static float *array(size_t size) {
    float *x = aligned_alloc(64, (size * sizeof *x + 63) / 64 * 64);
    if (!x) exit((fprintf(stderr, "not enough memory\n"), 1));
    for (size_t i = 0; i < size; i++) x[i] = i % 7 * 0.1f;
    return x;
}

int main(void) {
    const char *names[KINDS] = {"", "FedAvg, one loop", "FedAvg, own loops", "FedDyn, one loop", "FedDyn, own loops",
                                "SCAFFOLD, one loop", "SCAFFOLD, own loops", "FedDC, one loop", "FedDC, own loops"};
    float *w = array(P), *g = array(P), *c = array(P), *sum = array(P), *change = array(P), *x = array(P), *old = array(P),
          *older = array(P), *rows = array((size_t)P * CLIENTS), *drifts = array((size_t)P * CLIENTS);
    double least[KINDS];
    for (int time = 0; time < TIMES; time++)
        for (int kind = 0; kind < KINDS; kind++) {
            double start = now();
            for (int k = 0; k < CLIENTS; k++) {
                float *row = rows + (size_t)k * P, *drift = drifts + (size_t)k * P;
                gradient(w, g, k * 1e-3f);
                switch (kind) {
                case 1: average(w, g, sum); break;
                case 2: step(w, g, x), add(x, share, sum); break;
                case 3: dyn(w, g, sum, row); break;
                case 4:
                    step_row(w, g, row, x), memcpy(old, row, P * sizeof *old), new_row(x, w, old, -alpha, row);
                    add(x, share, sum);
                    break;
                case 5: scaffold(w, g, c, sum, change, row); break;
                case 6:
                    step_control(w, g, c, row, x), memcpy(old, row, P * sizeof *old), new_control(x, w, c, old, row);
                    add(x, share, sum), add_moved(x, w, -share / lr, change);
                    break;
                case 7: dc(w, g, c, sum, change, drift, row); break;
                case 8:
                    step_drift(w, g, c, drift, row, x), memcpy(old, row, P * sizeof *old);
                    memcpy(older, drift, P * sizeof *older), new_row(x, w, older, 1, drift);
                    new_control(x, w, c, old, row), add_moved(x, w, share, sum), add_moved(x, w, -share / lr, change);
                }
            }
            double each = (now() - start) / CLIENTS * 1e6;
            if (time == 0 || each < least[kind]) least[kind] = each;
        }
    for (int kind = 1; kind < KINDS; kind++)
        printf("%-20s %6.1f us a client, %+6.1f over FedAvg's\n", names[kind], least[kind] - least[0],
               least[kind] - least[2 - kind % 2]);
    return sum[1] + change[1] + rows[1] + drifts[1] > 1e30f;
}
