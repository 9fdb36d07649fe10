//! Measures all-gathers and matrix products together, and each alone.
//!
//! Each stream gets more work than is timed, before and after it. Then the timed products run only
//! next to all-gathers, and the timed all-gathers only next to products. The events show whether
//! this was so. If not, the shorter side gets more work and both run again.

use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::candidate::Candidate;
use super::device::{Event, Gpu, Memory, Stream};
use super::timer::{StartCounts, StreamTimer};
use crate::allgather::options::Options;
use crate::cublas::{Cublas, Matrices};
use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::statistics::Statistics;
use crate::report::{Overlap, microseconds};

/// Rows and columns of the matrices.
const SIDE: u32 = 8192;
const MATRIX_BYTES: u64 = 2 * (SIDE as u64) * (SIDE as u64);
const WORKSPACE_BYTES: u64 = 64 << 20;
/// Bytes of random elements that are generated once and repeated.
const RANDOM_BYTES: usize = 8 << 20;
/// Products before the timed ones, and timed products.
const LEAD: u32 = 2;
const TIMED: u32 = 12;
/// Rounds of each alone and both together, in turn; the medians count.
const ROUNDS: usize = 5;
/// Attempts of a round until both sides outlast each other.
const TRIES: u32 = 4;
/// Duration of products before anything is timed, because an idle GPU runs faster for a while.
const WARM_UP: Duration = Duration::from_millis(1500);
const GATHERS_MAX: u32 = 4000;

/// Device memory of the compute work.
pub(super) const MEMORY_BYTES: u64 = 3 * MATRIX_BYTES + WORKSPACE_BYTES;

/// Matrix products on their own stream.
pub(super) struct Compute {
    /// Declared before the memory that it uses.
    cublas: Cublas,
    gpu: Gpu,
    stream: Rc<Stream>,
    matrices: Matrices,
    _memory: [Memory; 4],
}

/// Numbers of products and all-gathers, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OverlapCounts {
    products_after: u32,
    gathers_before: u32,
    gathers: u32,
    gathers_after: u32,
}

/// Times of one rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct OverlapTimes {
    product: Duration,
    gather: Duration,
    /// Whether the products outlasted the timed all-gathers.
    products_last: bool,
    /// Whether the all-gathers outlasted the timed products.
    gathers_last: bool,
}

/// Times of all ranks in a round.
struct Round {
    product_alone: Duration,
    gather_alone: Duration,
    seen: OverlapTimes,
}

impl Compute {
    /// Loads cuBLAS and fills matrices with random numbers.
    ///
    /// # Errors
    /// If cuBLAS cannot be loaded, or memory cannot be allocated.
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
            let mut random = random_elements();
            for offset in (0..matrix.bytes).step_by(RANDOM_BYTES) {
                random = gpu.upload(&stream, matrix.address + offset, random)?;
            }
        }
        // SAFETY: stream and workspace are dropped after `cublas` (field order), and the GPU is
        // current.
        unsafe { cublas.run_on(stream.raw(), workspace.address, WORKSPACE_BYTES as usize) }?;
        let matrices = Matrices {
            side: SIDE.cast_signed(),
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

    /// Runs products until the GPU has its sustained clock rate.
    fn warm_up(&self) -> Result<()> {
        let started_at = Instant::now();
        while started_at.elapsed() < WARM_UP {
            self.enqueue(TIMED)?;
            let end = self.mark()?;
            self.gpu.wait(&end, "matrix products")?;
        }
        Ok(())
    }

    /// Returns the time of one product without all-gathers.
    fn alone(&self) -> Result<Duration> {
        self.enqueue(LEAD)?;
        let begin = self.mark()?;
        self.enqueue(TIMED)?;
        let end = self.mark()?;
        self.gpu.wait(&end, "matrix products")?;
        Ok(self.gpu.elapsed(&begin, &end)? / TIMED)
    }

    fn mark(&self) -> Result<Event> {
        mark(&self.gpu, &self.stream)
    }
}

/// Times `candidate` together with products, and both alone, in rounds. Collective.
///
/// # Errors
/// If a product or an all-gather fails.
pub(super) fn measure_overlap(
    timer: &mut StreamTimer,
    comm: &Comm,
    compute: &Compute,
    candidate: &mut Candidate<'_>,
) -> Result<Overlap> {
    compute.warm_up()?;
    let product = longest(comm, compute.alone()?)?;
    let first = longest(
        comm,
        timer.time_starts(candidate, StartCounts { warmup: 2, timed: 4, aligned: false })?,
    )?;
    let mut amounts = OverlapCounts::of(product, first, candidate);
    let mut rounds = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let product_alone = longest(comm, compute.alone()?)?;
        let counts = StartCounts { warmup: 2, timed: amounts.gathers, aligned: false };
        let gather_alone = longest(comm, timer.time_starts(candidate, counts)?)?;
        let seen = overlapped(timer, comm, compute, candidate, &mut amounts)?;
        rounds.push(Round { product_alone, gather_alone, seen });
    }
    let median =
        |of: fn(&Round) -> Duration| Statistics::of(rounds.iter().map(of).collect()).median;
    let (product_alone, gather_alone) =
        (median(|round| round.product_alone), median(|round| round.gather_alone));
    let (product, gather) = (median(|round| round.seen.product), median(|round| round.seen.gather));
    let ratio = |together: Duration, alone: Duration| together.as_secs_f64() / alone.as_secs_f64();
    Ok(Overlap {
        path: candidate.name().to_owned(),
        compute_alone_us: microseconds(product_alone),
        compute_us: microseconds(product),
        compute_ratio: ratio(product, product_alone),
        gather_alone_us: microseconds(gather_alone),
        gather_us: microseconds(gather),
        gather_ratio: ratio(gather, gather_alone),
        overlapped: rounds.iter().all(|round| round.seen.products_last && round.seen.gathers_last),
    })
}

/// Runs both together, and again with more work on the side that ended too early. Returns the
/// longest times of all ranks.
fn overlapped(
    timer: &mut StreamTimer,
    comm: &Comm,
    compute: &Compute,
    candidate: &mut Candidate<'_>,
    amounts: &mut OverlapCounts,
) -> Result<OverlapTimes> {
    let mut tries = 0;
    loop {
        let seen = run(timer, compute, candidate, *amounts)?;
        let all = comm.share("overlap times", &seen)?;
        let seen = OverlapTimes {
            product: all.iter().map(|seen| seen.product).max().unwrap_or_default(),
            gather: all.iter().map(|seen| seen.gather).max().unwrap_or_default(),
            products_last: all.iter().all(|seen| seen.products_last),
            gathers_last: all.iter().all(|seen| seen.gathers_last),
        };
        tries += 1;
        if tries == TRIES || (seen.products_last && seen.gathers_last) {
            return Ok(seen);
        }
        amounts.stretch(seen.products_last, seen.gathers_last, candidate);
    }
}

/// Runs both once. The products are enqueued first, because their queue holds all of them;
/// enqueueing the all-gathers may block the host.
fn run(
    timer: &mut StreamTimer,
    compute: &Compute,
    candidate: &mut Candidate<'_>,
    amounts: OverlapCounts,
) -> Result<OverlapTimes> {
    let (gpu, stream) = (timer.gpu.clone(), Rc::clone(&timer.stream));
    timer.align_ranks()?;
    let begin = mark(&gpu, &stream)?;
    gpu.stream_wait_event(&compute.stream, &begin)?;
    compute.enqueue(LEAD)?;
    let product_begin = compute.mark()?;
    compute.enqueue(TIMED)?;
    let product_end = compute.mark()?;
    compute.enqueue(amounts.products_after)?;
    let products_end = compute.mark()?;
    candidate.enqueue(amounts.gathers_before)?;
    let gather_begin = mark(&gpu, &stream)?;
    candidate.enqueue(amounts.gathers)?;
    let gather_end = mark(&gpu, &stream)?;
    candidate.enqueue(amounts.gathers_after)?;
    let gathers_end = mark(&gpu, &stream)?;
    gpu.wait(&gathers_end, candidate.name())?;
    gpu.wait(&products_end, "matrix products")?;
    Ok(OverlapTimes {
        product: gpu.elapsed(&product_begin, &product_end)? / TIMED,
        gather: gpu.elapsed(&gather_begin, &gather_end)? / amounts.gathers.max(1),
        products_last: gpu.milliseconds(&gather_end, &products_end)? >= 0.0,
        gathers_last: gpu.milliseconds(&product_end, &gathers_end)? >= 0.0,
    })
}

impl OverlapCounts {
    /// Returns timed all-gathers for about the duration of the timed products, preceded by the
    /// duration of one product, and followed by enough to outlast products that are 10 % slower
    /// than alone.
    fn of(product: Duration, gather: Duration, candidate: &Candidate<'_>) -> Self {
        let products = |count: f64| {
            let gathers = count * product.as_secs_f64() / gather.as_secs_f64().max(1e-9);
            candidate.whole((gathers.ceil() as u32).clamp(1, GATHERS_MAX))
        };
        Self {
            products_after: 4,
            gathers_before: products(1.0),
            gathers: products(f64::from(TIMED)),
            gathers_after: products(3.0),
        }
    }

    fn stretch(&mut self, products_last: bool, gathers_last: bool, candidate: &Candidate<'_>) {
        if !products_last {
            self.products_after += TIMED;
        }
        if !gathers_last || !products_last {
            // More products also need more all-gathers next to them, because the timed products end
            // later.
            self.gathers_after = candidate.whole(self.gathers_after * 2);
        }
    }
}

fn mark(gpu: &Gpu, stream: &Stream) -> Result<Event> {
    let event = gpu.event()?;
    gpu.record(&event, stream)?;
    Ok(event)
}

fn longest(comm: &Comm, mine: Duration) -> Result<Duration> {
    let all = comm.share("time of overlap", &mine)?;
    Ok(all.into_iter().max().unwrap_or_default())
}

/// Returns bf16 elements with magnitudes from 0.5 to 2 and either sign. Zeros would use less power
/// than real data.
fn random_elements() -> Vec<u8> {
    let mut random = vec![0; RANDOM_BYTES];
    for element in random.chunks_exact_mut(2) {
        let magnitude = fastrand::f32().mul_add(1.5, 0.5);
        let value = if fastrand::bool() { magnitude } else { -magnitude };
        element.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    }
    random
}
