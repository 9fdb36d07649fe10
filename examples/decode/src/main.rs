//! Decodes on all GPUs of the machine: collectives over one arena, in a CUDA graph per batch size.
//!
//! In a step the ranks add their partial hidden states, gather the logits of all parts of the
//! vocabulary, and receive the tokens of rank 0. Copies on the stream replace the model's kernels.

use std::error::Error;
use std::ops::Range;
use std::ptr::NonNull;

use cudarc::driver::{CudaContext, result, sys};
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::{Group, Rank, cuda, group};

#[cfg(test)]
mod tests;

const STEPS: usize = 20;
/// The batch sizes that have a graph, in ascending order.
const BATCHES: [usize; 3] = [1, 4, BATCH_MAX];
const BATCH_MAX: usize = 16;
/// The elements of the hidden state of a token, and the most ranks.
const WIDTH: usize = 64;
// The places of hidden states, logits and tokens in the arena, in elements.
const HIDDEN: usize = 0;
const LOGITS: usize = BATCH_MAX * WIDTH;
const TOKENS: usize = LOGITS + BATCH_MAX * WIDTH;
const ARENA: usize = TOKENS + BATCH_MAX;

fn main() -> Result<(), Box<dyn Error>> {
    run_ranks(CudaContext::device_count()? as usize)
}

/// Runs each rank on a thread of its own, with a GPU of its own.
fn run_ranks(ranks: usize) -> Result<(), Box<dyn Error>> {
    let ended = in_process::run(ranks, |bootstrap| {
        let rank = bootstrap.rank();
        let group = Group::open(bootstrap, cuda::Fabric::open(rank, ranks, rank.0)?)?;
        Ok(decode(group).map_err(|error| format!("rank {rank}: {error}")))
    });
    let errors: Vec<String> = ended?.into_iter().filter_map(Result::err).collect();
    if errors.is_empty() { Ok(()) } else { Err(errors.join("\n").into()) }
}

fn decode(mut group: Group) -> Result<(), Box<dyn Error>> {
    let (rank, ranks) = (group.rank().index(), group.ranks());
    let stream = CudaContext::new(rank)?.new_stream()?;
    let (order, raw) = (cuda::Stream::from(&stream), stream.cu_stream());

    // After an error the arena is not freed, because peers may still write to it.
    // SAFETY: `CudaContext::new` has made the context current on this thread.
    let arena = unsafe { result::malloc_sync(ARENA * size_of::<i32>()) }?;
    let base = NonNull::new(arena as *mut u8).ok_or("the driver allocates nothing at 0")?;
    // SAFETY: the arena has this length, is freed after `release`, and only `stream` accesses it.
    let window = group.window_over(unsafe { group.register_at::<i32>(base, ARENA) }?)?;

    let address = |element: usize| arena + (element * size_of::<i32>()) as u64;
    let copy = |to: usize, from: usize, len: usize| {
        let bytes = len * size_of::<i32>();
        // SAFETY: both ranges are in the arena, which is freed after the last replay.
        unsafe { result::memcpy_dtod_async(address(to), address(from), bytes, raw) }
    };
    let prepare = |builder: group::OperationBuilder<'_, i32>| {
        // SAFETY: each replay is synchronised before anything is dropped, and no slice is borrowed.
        unsafe { builder.in_place().capturable() }.prepare()
    };

    let mut recorded = Vec::new();
    for batch in BATCHES {
        let mut add = prepare(group.all_reduce(batch * WIDTH).output_into(&window, HIDDEN))?;
        let mut gather = prepare(group.all_gather(batch).output_into(&window, LOGITS))?;
        let mut share = prepare(group.broadcast(Rank(0), batch).output_into(&window, TOKENS))?;

        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        drop(add.start_on(&order)?);
        copy(LOGITS + rank * batch, HIDDEN + rank * batch, batch)?;
        drop(gather.start_on(&order)?);
        if rank == 0 {
            copy(TOKENS, LOGITS + (ranks - 1) * batch, batch)?;
        }
        drop(share.start_on(&order)?);
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0))?.ok_or("no graph")?;
        recorded.push((batch, graph, [add, gather, share]));
    }

    for step in 0..STEPS {
        // Every rank has as many requests, and takes the smallest graph that has room for them.
        let requests = 1 + step * 7 % BATCH_MAX;
        let fitting = recorded.iter_mut().find(|(batch, ..)| *batch >= requests);
        let (batch, graph, operations) = fitting.ok_or("no graph is large enough")?;

        let (own, mut found) = (sums(rank..rank + 1, step, *batch), vec![0; ARENA]);
        // SAFETY: the range is in the arena, and `own` lives until the stream is synchronised.
        let written = unsafe { result::memcpy_htod_async(address(HIDDEN), &own, raw) };
        let launched = graph.launch();
        // SAFETY: the arena has this length, and `found` lives until the stream is synchronised.
        let read = unsafe { result::memcpy_dtoh_async(&mut found, arena, raw) };
        stream.synchronize()?;
        written.and(launched).and(read)?;
        // The outputs are undefined if the group has ended, and this says why.
        operations.iter_mut().try_for_each(|operation| operation.check())?;

        let hidden = sums(0..ranks, step, *batch);
        assert_eq!(found[HIDDEN..][..hidden.len()], hidden, "step {step}");
        assert_eq!(found[LOGITS..][..ranks * *batch], hidden[..ranks * *batch], "step {step}");
        assert_eq!(found[TOKENS..][..*batch], hidden[(ranks - 1) * *batch..][..*batch]);
    }

    println!("rank {rank} of {ranks}: {STEPS} steps, all results equal");
    drop(recorded);
    group.release(window)?;
    // SAFETY: the stream is idle, and no rank can access the arena after `release`.
    unsafe { result::free_sync(arena) }?;
    Ok(group.close()?)
}

/// Returns the sums of what these ranks add to the hidden states of a step.
fn sums(ranks: Range<usize>, step: usize, batch: usize) -> Vec<i32> {
    let value = |rank, index| (step * 1000 + rank * 100 + index) as i32;
    (0..batch * WIDTH).map(|index| ranks.clone().map(|rank| value(rank, index)).sum()).collect()
}
