//! Computes `(input × up) × down` with both matrices divided over the ranks, and compares the result with the processor's.

use std::error::Error;
use std::sync::Arc;

use cudarc::cublas::CudaBlas;
use cudarc::driver::CudaContext;
use peerlane::{Backend, OpenOptions, cuda};

use arena::Arena;
use matrices::{multiply, product, values};

mod arena;
mod matrices;

const TOKENS: usize = 64;
const WIDTH: usize = 128;
/// The hidden units of each rank.
const UNITS: usize = 256;
const STARTS: usize = 100;

fn main() -> Result<(), Box<dyn Error>> {
    // A backend that is named lets ranks share a GPU.
    let mut group = OpenOptions::default().backend(Backend::Cuda).from_env()?;
    let (rank, ranks) = (group.rank().index(), group.ranks());
    let device = group.selection().device.unwrap_or(0);
    let stream = CudaContext::new(device as usize)?.new_stream()?;
    let blas = CudaBlas::new(Arc::clone(&stream))?;

    let mut arena = Arena::new(&stream, 1 << 22)?;
    // SAFETY: the arena outlives the window, which is released below.
    let window = group.window_over(unsafe { arena.register(&group) }?)?;
    let (mut input, mut up) = (arena.take(TOKENS * WIDTH), arena.take(WIDTH * UNITS));
    let hidden = arena.take(ranks * TOKENS * UNITS);
    let (mut down, mut partial) = (arena.take(UNITS * WIDTH), arena.take(TOKENS * WIDTH));
    let block = hidden.begin + rank * TOKENS * UNITS;
    let mut own_hidden = arena.part(block..block + TOKENS * UNITS);
    stream.memcpy_htod(&values(0, TOKENS * WIDTH), &mut *input.slice)?;
    stream.memcpy_htod(&values(1 + rank, WIDTH * UNITS), &mut *up.slice)?;
    stream.memcpy_htod(&values(100 + rank, UNITS * WIDTH), &mut *down.slice)?;

    let mut gather =
        (group.all_gather(TOKENS * UNITS).output_into(&window, hidden.begin).in_place())
            .prepare()?;
    let mut add = (group.all_reduce(TOKENS * WIDTH).output_into(&window, partial.begin).in_place())
        .prepare()?;
    let order = cuda::Stream::from(&stream);
    for _ in 0..STARTS {
        multiply(&blas, (TOKENS, WIDTH, UNITS), &input, &up, &mut own_hidden)?;
        let gathered = gather.start_on(&order)?;
        multiply(&blas, (TOKENS, UNITS, WIDTH), &own_hidden, &down, &mut partial)?;
        // What reads the hidden units is on the stream now, so the next start may overwrite them.
        drop(gathered);
        drop(add.start_on(&order)?);
    }
    let (found_hidden, found) =
        (stream.clone_dtoh(&*hidden.slice)?, stream.clone_dtoh(&*partial.slice)?);
    gather.check()?;
    add.check()?;

    let mut expected = vec![0.0; TOKENS * WIDTH];
    for other in 0..ranks {
        let up = values(1 + other, WIDTH * UNITS);
        let hidden = product((TOKENS, WIDTH, UNITS), &values(0, TOKENS * WIDTH), &up);
        assert_eq!(found_hidden[other * hidden.len()..][..hidden.len()], hidden, "rank {other}");
        let down = values(100 + other, UNITS * WIDTH);
        let part = product((TOKENS, UNITS, WIDTH), &hidden, &down);
        expected.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
    }
    assert_eq!(found, expected);
    println!("rank {rank} of {ranks} on {}: {STARTS} starts, all results equal", group.selection());
    drop((gather, add));
    group.release(window)?;
    Ok(group.close()?)
}
