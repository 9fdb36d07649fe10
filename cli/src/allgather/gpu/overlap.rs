//! Measures how much all-gathers and matrix products slow each other down when they run at the same
//! time.
//!
//! Each stream gets more work than is timed, before and after it. Then the timed products run only
//! next to all-gathers, and the timed all-gathers only next to products. The events show whether
//! this was so. If not, the shorter side gets more work and both run again.

use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::candidate::Candidate;
use super::content;
use super::device::{Event, Gpu, Memory, Stream};
use super::timer::{StartCounts, StreamTimer};
use crate::allgather::measure::Checked;
use crate::allgather::options::Options;
use crate::cublas::{Cublas, Matrices};
use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::statistics::Statistics;
use crate::report::{Overlap, microseconds};

const SIDE: u32 = 8192;
const MATRIX_BYTES: u64 = 2 * (SIDE as u64) * (SIDE as u64);
const WORKSPACE_BYTES: u64 = 64 << 20;
/// The number of untimed matrix products before the timed products.
const LEAD: u32 = 2;
const TIMED: u32 = 12;
/// The maximum number of rounds of measurements, of which the median is reported.
const ROUNDS_MAX: u32 = 5;
/// The maximum number of attempts to overlap matrix products and all-gathers for the whole measurement.
const TRIES: u32 = 4;
/// The duration of untimed products before a measurement, because an idle GPU runs faster for a
/// while.
const WARM_UP: Duration = Duration::from_millis(1500);
const ALL_GATHERS_MAX: u32 = 4000;

pub(super) const MEMORY_BYTES: u64 = 3 * MATRIX_BYTES + WORKSPACE_BYTES;

/// Enqueues matrix products of cuBLAS on a stream of their own.
pub(super) struct Compute {
    /// The cuBLAS handle, declared first so that it is destroyed before the memory that it uses.
    cublas: Cublas,
    gpu: Gpu,
    stream: Rc<Stream>,
    matrices: Matrices,
    _memory: [Memory; 4],
}

/// The numbers of matrix products and all-gathers in one overlapped run, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OverlapCounts {
    products_after: u32,
    all_gathers_before: u32,
    all_gathers: u32,
    all_gathers_after: u32,
}

/// The times of one matrix product and one all-gather, measured by one rank while both run at the same time.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct OverlapTimes {
    product: Duration,
    gather: Duration,
    /// Whether the matrix products ran longer than the timed all-gathers.
    products_last: bool,
    /// Whether the all-gathers ran longer than the timed matrix products.
    all_gathers_last: bool,
}

struct Round {
    product_alone: Duration,
    gather_alone: Duration,
    times: OverlapTimes,
}

impl Compute {
    pub(super) fn open(options: &Options, gpu: &Gpu) -> Result<Self> {
        gpu.enter()?;
        let cublas = Cublas::open(options.cublas.as_deref())?;
        let stream = gpu.stream()?;
        let memory = [
            gpu.allocate(MATRIX_BYTES)?,
            gpu.allocate(MATRIX_BYTES)?,
            gpu.allocate(MATRIX_BYTES)?,
            gpu.allocate(WORKSPACE_BYTES)?,
        ];
        let [left, right, product, workspace] = memory.each_ref().map(|memory| memory.span());
        for matrix in [left, right] {
            content::fill_with_bf16(gpu, &stream, matrix, &mut fastrand::Rng::new())?;
        }
        // SAFETY: stream and workspace are dropped after `cublas` (field order), and the GPU is
        // current.
        unsafe { cublas.run_on(stream.raw(), workspace.address, WORKSPACE_BYTES as usize) }?;
        let matrices = Matrices {
            rows: SIDE.cast_signed(),
            inner: SIDE.cast_signed(),
            columns: SIDE.cast_signed(),
            left: left.address,
            right: right.address,
            product: product.address,
        };
        Ok(Self { cublas, gpu: gpu.clone(), stream, matrices, _memory: memory })
    }

    fn enqueue(&self, products: u32) -> Result<()> {
        // SAFETY: the matrices have this size and live as long as `self`.
        (0..products).try_for_each(|_| unsafe { self.cublas.multiply(self.matrices) })
    }

    /// Runs matrix products until the GPU reaches its sustained clock rate.
    fn warm_up(&self) -> Result<()> {
        let started_at = Instant::now();
        while started_at.elapsed() < WARM_UP {
            self.enqueue(TIMED)?;
            let end = self.record_event()?;
            self.gpu.wait(&end, "matrix products")?;
        }
        Ok(())
    }

    /// Returns the time of one matrix product while no all-gather runs.
    fn alone(&self) -> Result<Duration> {
        self.enqueue(LEAD)?;
        let begin = self.record_event()?;
        self.enqueue(TIMED)?;
        let end = self.record_event()?;
        self.gpu.wait(&end, "matrix products")?;
        Ok(self.gpu.elapsed(&begin, &end)? / TIMED)
    }

    fn record_event(&self) -> Result<Event> {
        record_event(&self.gpu, &self.stream)
    }
}

/// Times `candidate` alone, matrix products alone, and both together, in several rounds, but at most `rounds`.
/// Collective.
///
/// If the library may hang, each part of the measurement has the time limit of
/// [`guarded`](Candidate::guarded), because all together can take long.
pub(super) fn measure_overlap(
    timer: &mut StreamTimer,
    comm: &Comm,
    compute: &Compute,
    candidate: &mut Candidate<'_>,
    rounds: Option<u32>,
) -> Result<Overlap> {
    compute.warm_up()?;
    let product = longest(comm, compute.alone()?)?;
    let gather = |candidate: &mut Candidate<'_>, timer: &mut StreamTimer, timed| {
        let counts = StartCounts { warmup: 2, timed, aligned: false };
        longest(comm, candidate.guarded(|candidate| timer.time_starts(candidate, counts))?)
    };
    let mut overlap_counts = OverlapCounts::of(product, gather(candidate, timer, 4)?, candidate);
    let number = rounds.map_or(ROUNDS_MAX, |rounds| rounds.min(ROUNDS_MAX));
    let mut rounds = Vec::with_capacity(number as usize);
    for _ in 0..number {
        let product_alone = longest(comm, compute.alone()?)?;
        let gather_alone = gather(candidate, timer, overlap_counts.all_gathers)?;
        let times = overlapped(timer, comm, compute, candidate, &mut overlap_counts)?;
        rounds.push(Round { product_alone, gather_alone, times });
    }
    let median =
        |of: fn(&Round) -> Duration| Statistics::of(rounds.iter().map(of).collect()).median;
    let (product_alone, gather_alone) =
        (median(|round| round.product_alone), median(|round| round.gather_alone));
    let (product, gather) =
        (median(|round| round.times.product), median(|round| round.times.gather));
    let ratio = |together: Duration, alone: Duration| together.as_secs_f64() / alone.as_secs_f64();
    Ok(Overlap {
        path: candidate.name().to_owned(),
        compute_alone_us: microseconds(product_alone),
        compute_us: microseconds(product),
        compute_ratio: ratio(product, product_alone),
        gather_alone_us: microseconds(gather_alone),
        gather_us: microseconds(gather),
        gather_ratio: ratio(gather, gather_alone),
        overlapped: rounds
            .iter()
            .all(|round| round.times.products_last && round.times.all_gathers_last),
    })
}

/// Times all-gathers and matrix products together, and repeats the run with more of those that
/// ended too early. Returns the longest times of all ranks.
fn overlapped(
    timer: &mut StreamTimer,
    comm: &Comm,
    compute: &Compute,
    candidate: &mut Candidate<'_>,
    overlap_counts: &mut OverlapCounts,
) -> Result<OverlapTimes> {
    let mut tries = 0;
    loop {
        let times =
            candidate.guarded(|candidate| run(timer, compute, candidate, *overlap_counts))?;
        let all = comm.share("overlap times", &times)?;
        let times = OverlapTimes {
            product: all.iter().map(|times| times.product).max().unwrap_or_default(),
            gather: all.iter().map(|times| times.gather).max().unwrap_or_default(),
            products_last: all.iter().all(|times| times.products_last),
            all_gathers_last: all.iter().all(|times| times.all_gathers_last),
        };
        tries += 1;
        if tries == TRIES || (times.products_last && times.all_gathers_last) {
            return Ok(times);
        }
        overlap_counts.increase(times.products_last, times.all_gathers_last, candidate);
    }
}

/// Matrix products are enqueued before all-gathers, because their queue holds all of them, and
/// enqueueing the all-gathers may block the host.
fn run(
    timer: &mut StreamTimer,
    compute: &Compute,
    candidate: &mut Candidate<'_>,
    overlap_counts: OverlapCounts,
) -> Result<OverlapTimes> {
    let (gpu, stream) = (timer.gpu.clone(), Rc::clone(&timer.stream));
    timer.align_ranks()?;
    let begin = record_event(&gpu, &stream)?;
    gpu.stream_wait_event(&compute.stream, &begin)?;
    compute.enqueue(LEAD)?;
    let product_begin = compute.record_event()?;
    compute.enqueue(TIMED)?;
    let product_end = compute.record_event()?;
    compute.enqueue(overlap_counts.products_after)?;
    let products_end = compute.record_event()?;
    candidate.enqueue(overlap_counts.all_gathers_before)?;
    let gather_begin = record_event(&gpu, &stream)?;
    candidate.enqueue(overlap_counts.all_gathers)?;
    let gather_end = record_event(&gpu, &stream)?;
    candidate.enqueue(overlap_counts.all_gathers_after)?;
    let all_gathers_end = record_event(&gpu, &stream)?;
    gpu.wait(&all_gathers_end, candidate.name())?;
    gpu.wait(&products_end, "matrix products")?;
    Ok(OverlapTimes {
        product: gpu.elapsed(&product_begin, &product_end)? / TIMED,
        gather: gpu.elapsed(&gather_begin, &gather_end)? / overlap_counts.all_gathers.max(1),
        products_last: gpu.milliseconds(&gather_end, &products_end)? >= 0.0,
        all_gathers_last: gpu.milliseconds(&product_end, &all_gathers_end)? >= 0.0,
    })
}

impl OverlapCounts {
    /// Computes how many all-gathers run before, during and after the timed matrix products.
    fn of(product: Duration, gather: Duration, candidate: &Candidate<'_>) -> Self {
        let products = |count: f64| {
            let all_gathers = count * product.as_secs_f64() / gather.as_secs_f64().max(1e-9);
            candidate.rounded_up((all_gathers.ceil() as u32).clamp(1, ALL_GATHERS_MAX))
        };
        Self {
            products_after: 4,
            all_gathers_before: products(1.0),
            all_gathers: products(f64::from(TIMED)),
            all_gathers_after: products(3.0),
        }
    }

    fn increase(&mut self, products_last: bool, all_gathers_last: bool, candidate: &Candidate<'_>) {
        if !products_last {
            self.products_after += TIMED;
        }
        if !all_gathers_last || !products_last {
            // More products also need more all-gathers next to them, because the timed products end
            // later.
            self.all_gathers_after =
                candidate.rounded_up((self.all_gathers_after * 2).min(ALL_GATHERS_MAX));
        }
    }
}

fn record_event(gpu: &Gpu, stream: &Stream) -> Result<Event> {
    let event = gpu.event()?;
    gpu.record(&event, stream)?;
    Ok(event)
}

fn longest(comm: &Comm, mine: Duration) -> Result<Duration> {
    let all = comm.share("time of overlap", &mine)?;
    Ok(all.into_iter().max().unwrap_or_default())
}
