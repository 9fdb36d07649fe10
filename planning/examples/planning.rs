//! Measures the time and memory for planning one rank and for simulating all ranks. `cargo xtask
//! bench plan` runs this and records it.
//!
//! Prints a line of JSON for each algorithm and number of ranks. Memory is what the heap holds at
//! most, beyond what it held before.

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::cost::Links;
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::Algorithm;
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, Options};
use peerlane_planning::topology::Topology;
use serde_json::json;

const RANKS_PER_NODE: usize = 8;
const PLANNED_NODES_MAX: usize = 2048;
const SIMULATED_NODES_MAX: usize = 512;
const BLOCK_BYTES: u64 = 1 << 20;
/// Only these algorithms are simulated, because the others send as much or more.
const SIMULATED: [Algorithm; 3] =
    [Algorithm::Ring, Algorithm::Hierarchical, Algorithm::HierarchicalRing];

/// A heap allocator that counts the bytes in use.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static HEAP: Counting = Counting;

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        let held = HELD.fetch_add(block.size(), Ordering::Relaxed) + block.size();
        MOST.fetch_max(held, Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `alloc`.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, place: *mut u8, block: Block) {
        HELD.fetch_sub(block.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the rules of `dealloc`, and `place` came from the system.
        unsafe { System.dealloc(place, block) }
    }
}

/// Runs `work` and returns its result with its peak heap use in bytes.
fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let result = work();
    (result, MOST.load(Ordering::Relaxed) - before)
}

/// The longest run that is timed by the wall clock, because processor time advances in steps of
/// milliseconds.
const SHORT: Duration = Duration::from_millis(200);

/// Returns how long this thread has run on a processor, so that other load does not count.
fn processor_time() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(Duration::from_nanos(text.split_whitespace().next()?.parse().ok()?))
}

fn main() {
    measure(PLANNED_NODES_MAX, SIMULATED_NODES_MAX);
}

/// Prints the times of all algorithms that fit, for up to these numbers of nodes.
fn measure(planned_nodes_max: usize, simulated_nodes_max: usize) {
    for &algorithm in Algorithm::ALL {
        for nodes in powers(planned_nodes_max) {
            let topology = Topology::even(nodes, RANKS_PER_NODE).expect("nodes have ranks");
            if schedule::fitting(&topology, shape()).any(|fitting| fitting == algorithm) {
                plan(algorithm, &topology);
            }
        }
    }

    for algorithm in SIMULATED {
        for nodes in powers(simulated_nodes_max) {
            simulate(algorithm, nodes);
        }
    }
}

fn powers(last: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), |nodes| Some(nodes * 2)).take_while(move |&n| n <= last)
}

fn shape() -> Shape {
    Shape { tiers: true, ..Shape::default() }
}

/// Prints how long planning takes for the slowest of three ranks, as the best of five runs.
fn plan(algorithm: Algorithm, topology: &Topology) {
    let ranks = topology.ranks();
    let make = |rank| schedule::plan(algorithm, topology, rank, shape()).expect("it has a plan");
    let best = |rank| {
        let times = (0..5).map(|_| {
            let start = Instant::now();
            std::hint::black_box(make(rank));
            start.elapsed()
        });
        times.min().unwrap_or_default()
    };
    let some = || [0, ranks / 3, ranks - 1].map(Rank::at).into_iter();
    let time = some().map(best).max().unwrap_or_default();
    let peaks = some().map(|rank| peak_bytes(|| make(rank)));
    let (steps, bytes) = peaks
        .map(|(plan, bytes)| {
            let steps: usize = plan.lanes.iter().map(|lane| lane.steps.len()).sum();
            (steps, bytes)
        })
        .max_by_key(|&(_, bytes)| bytes)
        .unwrap_or_default();
    let line = json!({
        "what": "plan", "algorithm": algorithm, "nodes": topology.nodes(), "ranks": ranks,
        "steps": steps, "seconds": time.as_secs_f64(), "peak_bytes": bytes,
    });
    println!("{line}");
}

fn simulate(algorithm: Algorithm, nodes: usize) {
    let topology = Topology::even(nodes, RANKS_PER_NODE).expect("nodes have ranks");
    let ranks = topology.ranks();
    let layout =
        Layout::new(Collective::AllGather, &vec![BLOCK_BYTES; ranks], 1).expect("blocks fit");
    let plan = |rank| schedule::plan(algorithm, &topology, rank, shape());
    let run = || {
        let (start, on_processor) = (Instant::now(), processor_time());
        let (simulation, bytes) = peak_bytes(|| {
            let (links, options) = (Links::default(), Options::default());
            let simulation = simulate::simulate(&topology, &layout, &links, &options, plan);
            simulation.expect("it can be simulated")
        });
        let elapsed = start.elapsed();
        let on_processor = on_processor.zip(processor_time()).map(|(before, now)| now - before);
        let time = on_processor.filter(|_| elapsed > SHORT).unwrap_or(elapsed);
        (time, bytes, simulation.steps)
    };
    let first = run();
    let repeats = if first.0 < SHORT { 4 } else { 0 };
    let best = (0..repeats).map(|_| run()).chain([first]).min_by_key(|run| run.0);
    let (time, bytes, steps) = best.expect("it has run");
    let line = json!({
        "what": "simulate", "algorithm": algorithm, "nodes": nodes, "ranks": ranks,
        "steps": steps, "seconds": time.as_secs_f64(), "peak_bytes": bytes,
    });
    println!("{line}");
}

#[cfg(test)]
mod tests {
    #[test]
    fn all_algorithms_that_fit_are_measured() {
        super::measure(2, 2);
    }
}
