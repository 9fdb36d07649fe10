//! Measures what the comparison of lengths costs in an all-to-all in which each pair of ranks has a length of its own.
//!
//! The ranks are threads of one process. Two resizable operations exchange the same blocks by turns: one with equal lengths, and one
//! with a length for each pair, whose digests the host compares after each start. The program prints the medians of rank 0.

use std::time::{Duration, Instant};

use clap::Parser;
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Backend, BlockLens, Error, OpenOptions, Operation, Part};

#[derive(Parser, Clone, Copy, Debug)]
struct Options {
    /// Set the backend
    #[arg(long, default_value = "host")]
    backend: Backend,
    /// Set the number of ranks
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Let all ranks use GPU 0 instead of one GPU each
    #[arg(long)]
    one_device: bool,
    /// Set the length of each block in bytes
    #[arg(long, default_value_t = 4096)]
    block_bytes: usize,
    /// Set the number of starts of each operation
    #[arg(long, default_value_t = 2000)]
    starts: usize,
}

fn main() -> Result<(), Error> {
    let options = Options::parse();
    let medians = in_process::run(options.ranks, |bootstrap| {
        let device = if options.one_device { 0 } else { bootstrap.rank().0 };
        let open = OpenOptions::default().backend(options.backend);
        let open = if options.backend == Backend::Host { open } else { open.device(device) };
        let mut group = open.open(bootstrap)?;

        let len = options.block_bytes / size_of::<u32>();
        let lens = vec![len; options.ranks];
        let mut equal = group.all_to_all::<u32>(len).resizable().prepare()?;
        let of_pairs = BlockLens::send_receive(&lens, &lens);
        let mut of_pairs = group.all_to_all::<u32>(of_pairs).resizable().prepare()?;

        let (mut first, mut second) = (Vec::new(), Vec::new());
        for _ in 0..options.starts {
            first.push(timed(equal.resize(Part::len(len))?)?);
            second.push(timed(of_pairs.resize(Part::send_receive(&lens, &lens))?)?);
        }
        group.barrier()?;
        drop((equal, of_pairs));
        group.close()?;
        Ok([first, second].map(median))
    })?;

    let [equal, of_pairs] = medians[0].map(|time| time.as_secs_f64() * 1e6);
    println!(
        "{} ranks, {} B: equal lengths {equal:.2} us, a length for each pair {of_pairs:.2} us, ratio {:.3}",
        options.ranks,
        options.block_bytes,
        of_pairs / equal
    );
    Ok(())
}

fn timed(operation: &mut Operation<u32>) -> Result<Duration, Error> {
    let begin = Instant::now();
    operation.run()?;
    Ok(begin.elapsed())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
