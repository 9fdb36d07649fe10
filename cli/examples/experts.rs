//! Measures how long it takes to send tokens to the ranks of their experts, with counts that the
//! receivers learn from each start.
//!
//! A launcher starts the ranks, as `mpirun -n 4 experts`. Each rank has `tokens` rows, each of
//! which goes to a random rank. Each iteration has another routing. An iteration is barrier, clock,
//! start, clock; its time is the maximum over the ranks. Rank 0 prints the median and the 99th
//! percentile of these maxima. Every byte is checked once for each routing. The program
//! `xtask/peers/openmpi_experts.c` does the same with Open MPI.

use std::time::Instant;

use clap::Parser;
use peerlane::{AllToAllV, Backend, Error, Group, OpenOptions, Rank};

/// The number of routings that the iterations use by turns.
const ROUTINGS: usize = 8;

#[derive(Parser, Clone, Copy, Debug)]
struct Options {
    /// Set the number of rows of each rank
    #[arg(long, default_value_t = 256)]
    tokens: usize,
    /// Set the number of rows for which the operation is prepared, if it is larger
    #[arg(long, default_value_t = 0)]
    tokens_max: usize,
    /// Set the number of bytes of a row
    #[arg(long, default_value_t = 7168)]
    row_bytes: usize,
    /// Send half of the rows to rank 0
    #[arg(long)]
    skew: bool,
    /// Set the number of measured iterations
    #[arg(long, default_value_t = 200)]
    iterations: usize,
    /// Set the number of iterations before them
    #[arg(long, default_value_t = 20)]
    warmup: usize,
}

fn main() -> Result<(), Error> {
    let options = Options::parse();
    let mut group = OpenOptions::default().backend(Backend::Host).from_env()?;
    let (rank, ranks) = (group.rank().index(), group.ranks());

    let most = options.tokens.max(options.tokens_max) * options.row_bytes;
    let mut exchange = group.all_to_all_v::<u8>(most, most * ranks).prepare()?;

    let counts = |routing| {
        let mut counts = vec![0; ranks];
        for token in 0..options.tokens {
            counts[destination(routing, rank, token, ranks, options.skew)] += options.row_bytes;
        }
        counts
    };
    let routings: Vec<Vec<usize>> = (0..ROUTINGS).map(counts).collect();

    for counts in &routings {
        fill(&mut exchange, rank, counts, options.row_bytes)?;
        exchange.run(counts)?;
        check(&exchange, rank, options.row_bytes)?;
    }

    let mut times = Vec::with_capacity(options.iterations);
    for iteration in 0..options.warmup + options.iterations {
        group.barrier()?;
        let begun = Instant::now();
        exchange.run(&routings[iteration % ROUTINGS])?;
        if iteration >= options.warmup {
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        }
    }

    let mut slowest = slowest(&mut group, &times)?;
    slowest.sort_by(f64::total_cmp);
    if rank == 0 {
        let last = slowest.len() - 1;
        let median = f64::midpoint(slowest[last / 2], slowest[last.div_ceil(2)]);
        println!(
            "{{\"tokens\":{},\"median_us\":{median:.3},\"p99_us\":{:.3},\"checked\":true}}",
            options.tokens,
            slowest[(last * 99).div_ceil(100)]
        );
    }
    drop(exchange);
    group.close()
}

/// Writes the rows of a routing, in the order of the ranks that get them.
fn fill(
    exchange: &mut AllToAllV<u8>,
    rank: usize,
    counts: &[usize],
    row_bytes: usize,
) -> Result<(), Error> {
    let mut rows = exchange.input_mut()?.chunks_exact_mut(row_bytes);
    for (to, bytes) in counts.iter().enumerate() {
        for (index, row) in rows.by_ref().take(bytes / row_bytes).enumerate() {
            row.fill(pattern(rank, to, index));
        }
    }
    Ok(())
}

/// Checks every row that has come.
fn check(exchange: &AllToAllV<u8>, rank: usize, row_bytes: usize) -> Result<(), Error> {
    for from in 0..exchange.received_counts().len() {
        let block = exchange.output_of(Rank::at(from))?;
        for (index, row) in block.chunks_exact(row_bytes).enumerate() {
            let expected = pattern(from, rank, index);
            assert!(row.iter().all(|byte| *byte == expected), "row {index} from rank {from}");
        }
    }
    Ok(())
}

/// Returns the maximum over the ranks for each iteration.
fn slowest(group: &mut Group, times: &[f64]) -> Result<Vec<f64>, Error> {
    let mut gather = group.all_gather::<f64>(times.len()).prepare()?;
    gather.input_mut()?.copy_from_slice(times);
    gather.run()?;
    let mut slowest = vec![0.0_f64; times.len()];
    for of_rank in gather.output()?.chunks_exact(times.len()) {
        for (slowest, time) in slowest.iter_mut().zip(of_rank) {
            *slowest = slowest.max(*time);
        }
    }
    Ok(slowest)
}

fn mixed(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

/// Returns the rank to which a token goes.
fn destination(routing: usize, from: usize, token: usize, ranks: usize, skew: bool) -> usize {
    let random = mixed((routing as u64) << 48 | (from as u64) << 32 | token as u64);
    if skew && random & 1 == 1 { 0 } else { (random >> 8) as usize % ranks }
}

fn pattern(from: usize, to: usize, row: usize) -> u8 {
    (mixed((from as u64) << 40 ^ (to as u64) << 50 ^ row as u64) >> 56) as u8
}
