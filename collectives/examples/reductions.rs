//! Times all-reduces and reduce-scatters of `f32` on host memory, beside a copy of the same bytes and an addition of two arrays.
//!
//! `mpirun -n 4 target/release/examples/reductions`, or with any other launcher; every rank is a process. Rank 0 prints microseconds.

use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, Operation};
use peerlane_hal::{Deadline, ErrorKind};
use peerlane_host as host;

const ROUNDS: usize = 11;
/// Each round takes about as long as this number of copied bytes.
const BYTES_PER_ROUND: usize = 64 << 20;

fn main() -> Result<(), Error> {
    let environment = Environment::from_env()?.ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, "no launcher has started this process; use `mpirun`")
    })?;
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(Duration::from_secs(30)))?;
    let ranks = bootstrap.ranks();
    let fabric = host::Fabric::open(bootstrap.rank(), ranks)?;
    let mut group = Group::open(bootstrap, fabric)?;
    if group.rank().0 == 0 {
        println!("bytes,all_reduce,reduce_scatter,copy,addition");
    }
    let mut len = 256;
    while len * size_of::<f32>() <= 64 << 20 {
        let starts = (BYTES_PER_ROUND / (len * size_of::<f32>()) / ranks).clamp(1, 2000);
        let mut reduce = group.all_reduce::<f32>(len).prepare()?;
        reduce.input_mut()?.fill(1.0);
        let all_reduce = time(&mut group, &mut reduce, starts)?;
        assert!(reduce.output()?.iter().all(|sum| *sum == ranks as f32));
        drop(reduce);
        let mut scatter = group.reduce_scatter::<f32>(len / ranks).prepare()?;
        scatter.input_mut()?.fill(1.0);
        let reduce_scatter = time(&mut group, &mut scatter, starts)?;
        assert!(scatter.output()?.iter().all(|sum| *sum == ranks as f32));
        drop(scatter);
        let (copy, addition) = limits(&mut group, len, starts)?;
        if group.rank().0 == 0 {
            let micros =
                [all_reduce, reduce_scatter, copy, addition].map(|time| time.as_secs_f64() * 1e6);
            println!(
                "{},{}",
                len * size_of::<f32>(),
                micros.map(|micros| format!("{micros:.2}")).join(",")
            );
        }
        len *= 4;
    }
    group.close()
}

/// Returns the median time of a start.
fn time(
    group: &mut Group,
    operation: &mut Operation<f32>,
    starts: usize,
) -> Result<Duration, Error> {
    let mut times = Vec::new();
    for _ in 0..=ROUNDS {
        group.barrier()?;
        let begin = Instant::now();
        for _ in 0..starts {
            operation.run()?;
        }
        times.push(begin.elapsed() / starts as u32);
    }
    Ok(median(times))
}

/// Returns the times of a copy of an array, and of the addition of two, while all ranks do the same.
fn limits(group: &mut Group, len: usize, starts: usize) -> Result<(Duration, Duration), Error> {
    let (source, mut target) = (vec![1_f32; len], vec![0_f32; len]);
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..=ROUNDS {
        group.barrier()?;
        let begin = Instant::now();
        for _ in 0..starts {
            target.copy_from_slice(std::hint::black_box(&source));
        }
        times[0].push(begin.elapsed() / starts as u32);
        group.barrier()?;
        let begin = Instant::now();
        for _ in 0..starts {
            let sums = target.iter_mut().zip(std::hint::black_box(&source));
            sums.for_each(|(sum, value)| *sum += value);
        }
        times[1].push(begin.elapsed() / starts as u32);
    }
    let [copies, additions] = times;
    Ok((median(copies), median(additions)))
}

/// Returns the median of all but the first, which warms up.
fn median(mut times: Vec<Duration>) -> Duration {
    times.remove(0);
    times.sort();
    times[times.len() / 2]
}
