//! Computes `(input × up) × down` with both matrices and the tokens divided over the ranks. The
//! tokens of a rank are multiplied when they have arrived, and its sums leave when they are written.

use std::error::Error;
use std::sync::Arc;

use cudarc::cublas::CudaBlas;
use cudarc::driver::CudaContext;
use peerlane::{Backend, OpenOptions, cuda};

use arena::{Arena, Part};
use matrices::{multiply, product, values};

#[path = "../arena.rs"]
mod arena;
#[path = "../matrices.rs"]
mod matrices;

/// The tokens of each rank.
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
    let (mut up, mut down) = (arena.take(WIDTH * UNITS), arena.take(UNITS * WIDTH));
    // The tokens of all ranks, their hidden units of this rank, and what these add to the results.
    let [input, hidden, partial] =
        [WIDTH, UNITS, WIDTH].map(|width| arena.take(ranks * TOKENS * width));
    let result = arena.take(TOKENS * WIDTH);
    let [mut inputs, mut hiddens, mut partials] =
        [(&input, WIDTH), (&hidden, UNITS), (&partial, WIDTH)].map(|(all, width)| {
            let block = |rank| all.begin + rank * TOKENS * width;
            let blocks = (0..ranks).map(|rank| arena.part(block(rank)..block(rank + 1)));
            blocks.collect::<Vec<Part>>()
        });
    stream.memcpy_htod(&values(rank, TOKENS * WIDTH), &mut *inputs[rank].slice)?;
    stream.memcpy_htod(&values(100 + rank, WIDTH * UNITS), &mut *up.slice)?;
    stream.memcpy_htod(&values(200 + rank, UNITS * WIDTH), &mut *down.slice)?;

    let gather = group.all_gather(TOKENS * WIDTH).output_into(&window, input.begin).in_place();
    let mut gather = gather.arrivals().prepare()?;
    let scatter = group.reduce_scatter(TOKENS * WIDTH).input_from(&window, partial.begin);
    let scatter = scatter.output_into(&window, result.begin);
    let mut scatter = scatter.departures().prepare()?;
    let blocks = |chunks: &[peerlane::BlockChunk]| {
        let mut blocks: Vec<_> = chunks.iter().map(|chunk| chunk.block).collect();
        blocks.dedup();
        blocks
    };
    let (arrivals, departures) = (blocks(gather.arrivals()), blocks(scatter.departures()));

    let order = cuda::Stream::from(&stream);
    for _ in 0..STARTS {
        // The own tokens are the first block. While they are multiplied, others arrive.
        let mut gathering = gather.start_beside(&order)?;
        for &block in &arrivals {
            gathering.wait_on(block, &order)?;
            let (input, hidden) = (&inputs[block.index()], &mut hiddens[block.index()]);
            multiply(&blas, (TOKENS, WIDTH, UNITS), input, &up, hidden)?;
        }
        gathering.finish()?;

        // The block that leaves first is multiplied first. While it moves, others are multiplied.
        let mut scattering = scatter.start_beside(&order)?;
        for &block in &departures {
            let (hidden, partial) = (&hiddens[block.index()], &mut partials[block.index()]);
            multiply(&blas, (TOKENS, UNITS, WIDTH), hidden, &down, partial)?;
            scattering.depart_on(block, &order)?;
        }
        scattering.finish()?;
    }
    let found = stream.clone_dtoh(&*result.slice)?;
    gather.check()?;
    scatter.check()?;

    let mut expected = vec![0.0; TOKENS * WIDTH];
    for other in 0..ranks {
        let up = values(100 + other, WIDTH * UNITS);
        let hidden = product((TOKENS, WIDTH, UNITS), &values(rank, TOKENS * WIDTH), &up);
        let down = values(200 + other, UNITS * WIDTH);
        let part = product((TOKENS, UNITS, WIDTH), &hidden, &down);
        expected.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
    }
    assert_eq!(found, expected);
    println!("rank {rank} of {ranks} on {}: {STARTS} starts, all results equal", group.selection());
    drop((gather, scatter));
    group.release(window)?;
    Ok(group.close()?)
}
