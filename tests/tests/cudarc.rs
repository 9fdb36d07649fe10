//! Gathers from and into memory of the crate cudarc, through the facade, on the simulated driver.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::hal::Rank;
use peerlane::{Algorithm, Error, ErrorKind, Group, MemoryRange, RegisterSlice, cuda, host};

const RANKS: usize = 3;
const LEN: usize = 1001;

/// Installs the simulated driver and serialises the tests, which share its devices.
///
/// A new context of cudarc waits for the whole device when its first stream is made. CUDA refuses that while another
/// test captures a stream there, and fails the capture.
fn devices() -> MutexGuard<'static, ()> {
    static ONE_BY_ONE: Mutex<()> = Mutex::new(());
    let turn = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    peerlane_simulated_driver::install();
    turn
}

/// Runs every rank on a thread of its own, with the device of its number and a stream there.
fn on_ranks(rank: impl Fn(&mut Group, &Arc<CudaStream>) -> Result<(), Error> + Sync) {
    let _devices = devices();
    in_process::run(RANKS, |bootstrap| {
        let number = bootstrap.rank();
        let fabric = cuda::Fabric::open(number, RANKS, number.0)?;
        let mut group = Group::open(bootstrap, fabric)?;
        rank(&mut group, &stream(number))?;
        group.close()
    })
    .unwrap();
}

fn stream(rank: Rank) -> Arc<CudaStream> {
    CudaContext::new(rank.index()).unwrap().new_stream().unwrap()
}

/// The elements that a rank contributes to a start, all of them different.
fn block(rank: usize, start: usize) -> Vec<i32> {
    (0..LEN).map(|index| (index + LEN * (rank + RANKS * start)) as i32).collect()
}

fn blocks(start: usize) -> Vec<i32> {
    (0..RANKS).flat_map(|rank| block(rank, start)).collect()
}

fn read(memory: MemoryRange) -> Vec<i32> {
    let mut elements = vec![0; memory.bytes as usize / size_of::<i32>()];
    // SAFETY: the range is memory of an operation that has no open start.
    unsafe { result::memcpy_dtoh_sync(&mut elements, memory.base.as_ptr() as u64) }.unwrap();
    elements
}

fn write(memory: MemoryRange, elements: &[i32]) {
    assert_eq!(memory.bytes, size_of_val(elements) as u64);
    // SAFETY: as above.
    unsafe { result::memcpy_htod_sync(memory.base.as_ptr() as u64, elements) }.unwrap();
}

/// Takes the slice out of its `Arc`, which must be the last one.
fn given_back(slice: Arc<CudaSlice<i32>>) -> CudaSlice<i32> {
    Arc::into_inner(slice).expect("the operation was dropped")
}

#[test]
fn a_slice_is_the_input_of_a_gather_and_is_given_back() {
    on_ranks(|group, stream| {
        let rank = group.rank().index();
        let mut slice = Arc::new(stream.clone_htod(&block(rank, 0)).unwrap());
        for algorithm in [Algorithm::Direct, Algorithm::Ring, Algorithm::DoubleRing] {
            // SAFETY: peers do not access it, and all other work is on `stream`.
            let input = unsafe { group.register_slice(Arc::clone(&slice)) }?;
            assert_eq!(input.len(), LEN);
            let mut gather = group.all_gather(LEN).algorithm(algorithm).input(input).prepare()?;
            for start in 0..3 {
                write(gather.input_memory().unwrap(), &block(rank, start));
                gather.start_on(&cuda::Stream::from(stream))?.wait()?;
                assert_eq!(stream.clone_dtoh(&*slice).unwrap(), block(rank, start));
                assert!(read(gather.output_memory()) == blocks(start), "{algorithm}, {start}");
            }
            assert_eq!(Arc::strong_count(&slice), 2, "the operation keeps the slice");
            drop(gather);
            slice = Arc::new(given_back(slice));
        }
        Ok(())
    });
}

#[test]
fn a_slice_is_the_output_of_a_gather_and_is_given_back() {
    on_ranks(|group, stream| {
        let rank = group.rank().index();
        let slice = Arc::new(stream.clone_htod(&vec![-1; RANKS * LEN]).unwrap());
        stream.synchronize().unwrap();
        // SAFETY: peers do not access it, and no stream holds work on it.
        let output = unsafe { group.register_slice(Arc::clone(&slice)) }?;
        let mut gather =
            group.all_gather(LEN).algorithm(Algorithm::Pull).output(output).prepare()?;
        for start in 0..3 {
            write(gather.input_memory().unwrap(), &block(rank, start));
            gather.run()?;
            assert!(stream.clone_dtoh(&*slice).unwrap() == blocks(start), "start {start}");
            stream.synchronize().unwrap();
        }
        assert_eq!(Arc::strong_count(&slice), 2, "the operation keeps the slice");
        drop(gather);
        assert!(stream.clone_dtoh(&given_back(slice)).unwrap() == blocks(2));
        Ok(())
    });
}

#[test]
fn a_slice_without_another_owner_lives_as_long_as_its_operation() {
    on_ranks(|group, stream| {
        let rank = group.rank().index();
        let slice = stream.clone_htod(&block(rank, 0)).unwrap();
        stream.synchronize().unwrap();
        // SAFETY: peers do not access it, and no stream holds work on it.
        let input = unsafe { group.register_slice(slice) }?;
        let mut gather =
            group.all_gather(LEN).algorithm(Algorithm::Direct).input(input).prepare()?;
        // The pool would return the same memory again.
        let others: Vec<_> = (0..8).map(|_| stream.clone_htod(&[-1; LEN]).unwrap()).collect();
        stream.synchronize().unwrap();
        gather.run()?;
        assert!(read(gather.output_memory()) == blocks(0));
        drop(others);
        Ok(())
    });
}

#[test]
fn a_slice_of_a_wrong_length_is_an_error_on_every_rank() {
    on_ranks(|group, stream| {
        let len = if group.rank() == Rank(1) { LEN - 1 } else { LEN };
        let slice = Arc::new(stream.alloc_zeros::<i32>(len).unwrap());
        // SAFETY: nothing starts.
        let input = unsafe { group.register_slice(Arc::clone(&slice)) }?;
        let builder = group.all_gather(LEN).algorithm(Algorithm::Direct).input(input);
        let error = builder.prepare().unwrap_err();
        let own = len < LEN;
        assert_eq!(error.kind() == ErrorKind::InvalidArgument, own, "{error}");
        let text = "input has 4000 bytes, expected 4004 bytes";
        assert!(error.to_string().contains(text), "{error}");
        given_back(slice);
        Ok(())
    });
}

#[test]
fn a_slice_of_another_device_is_refused() {
    on_ranks(|group, _| {
        let other = Rank((group.rank().0 + 1) % RANKS as u32);
        let slice = Arc::new(stream(other).alloc_zeros::<i32>(LEN).unwrap());
        // SAFETY: nothing starts.
        let error = unsafe { group.register_slice(Arc::clone(&slice)) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = format!("the memory belongs to device {other}, expected ");
        assert!(error.to_string().starts_with("cannot register a buffer: "), "{error}");
        assert!(error.to_string().contains(&text), "{error}");
        given_back(slice);
        Ok(())
    });
}

#[test]
fn memory_of_a_pool_that_peers_access_is_refused() {
    on_ranks(|group, stream| {
        let slice = Arc::new(stream.alloc_zeros::<i32>(RANKS * LEN).unwrap());
        // SAFETY: nothing starts.
        let output = unsafe { group.register_slice(Arc::clone(&slice)) }?;
        // Peers put tagged data of fused starts elsewhere, and not into the output.
        let builder = group.all_gather(LEN).algorithm(Algorithm::Direct).engine("streams");
        let error = builder.output(output).prepare().unwrap_err();
        assert!(error.to_string().contains("stream-ordered pool"), "{error}");
        given_back(slice);
        Ok(())
    });
}

#[test]
fn a_group_of_another_backend_refuses_slices() {
    let _devices = devices();
    let slice = stream(Rank(0)).alloc_zeros::<i32>(LEN).unwrap();
    let slice = Arc::new(slice);
    in_process::run(1, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let group = Group::open(bootstrap, fabric)?;
        // SAFETY: nothing starts.
        let error = unsafe { group.register_slice(Arc::clone(&slice)) }.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(
            error.to_string(),
            "cannot register a slice of 1001 elements on CUDA device 0: the fabric of the group is host, expected cuda"
        );
        group.close()
    })
    .unwrap();
    given_back(slice);
}

/// Copies of an all-to-all whose blocks depart behind copies on one stream, and are read on another one when they have
/// arrived.
struct Exchange {
    results: Vec<CudaSlice<i32>>,
    /// The addresses of what each rank gets, and of what each rank has given.
    places: Vec<[u64; 2]>,
    _sources: Vec<CudaSlice<i32>>,
}

impl Exchange {
    fn new(rank: usize, stream: &Arc<CudaStream>) -> Self {
        let sources = (0..RANKS).map(|to| stream.clone_htod(&block(rank, to)).unwrap());
        let sources: Vec<CudaSlice<i32>> = sources.collect();
        let results: Vec<_> = (0..RANKS).map(|_| stream.alloc_zeros(LEN).unwrap()).collect();
        stream.synchronize().unwrap();
        // During a capture, cudarc must not wait for the events of the slices.
        let address = |slice: &CudaSlice<i32>| slice.device_ptr(stream).0;
        let places = sources.iter().zip(&results).map(|(from, to)| [from, to].map(address));
        Self { places: places.collect(), results, _sources: sources }
    }

    fn start(
        &self,
        exchange: &mut peerlane::Operation<i32>,
        [writer, reader]: [&Arc<CudaStream>; 2],
    ) -> Result<(), Error> {
        let (arrivals, departures) = (exchange.arrivals().to_vec(), exchange.departures().to_vec());
        let mut start = exchange.start_beside(&cuda::Stream::from(writer))?;
        for chunk in departures {
            let place = start.input_block_memory(chunk.block)?;
            let [source, _] = self.places[chunk.block.index()];
            // SAFETY: both are memory of `LEN` elements, which nobody else writes before the block departs.
            unsafe {
                result::memcpy_dtod_async(
                    place.base.as_ptr() as u64,
                    source,
                    LEN * size_of::<i32>(),
                    writer.cu_stream(),
                )
            }
            .unwrap();
            start.depart_on(chunk.block, &cuda::Stream::from(writer))?;
        }
        for chunk in arrivals {
            start.wait_on(chunk, &cuda::Stream::from(reader))?;
            let place = start.output_of(chunk.block)?;
            let [_, target] = self.places[chunk.block.index()];
            // SAFETY: the block has arrived when the stream comes here, and is not overwritten before the handle is finished.
            unsafe {
                result::memcpy_dtod_async(
                    target,
                    place.base.as_ptr() as u64,
                    LEN * size_of::<i32>(),
                    reader.cu_stream(),
                )
            }
            .unwrap();
        }
        start.finish()
    }

    fn check(&self, rank: usize, stream: &Arc<CudaStream>) {
        for (from, result) in self.results.iter().enumerate() {
            assert!(stream.clone_dtoh(result).unwrap() == block(from, rank), "from {from}");
        }
    }
}

#[test]
fn blocks_depart_and_arrive_on_two_streams_also_in_a_graph() {
    on_ranks(|group, stream| {
        let rank = group.rank().index();
        let reader = &stream.context().new_stream().unwrap();
        let mut copies = Exchange::new(rank, stream);
        let builder = group.all_to_all::<i32>(LEN).arrivals().departures();
        // SAFETY: the replays are complete before the operation is dropped, and the host borrows nothing.
        let mut exchange = unsafe { builder.capturable() }.prepare()?;
        for _ in 0..5 {
            copies.start(&mut exchange, [stream, reader])?;
        }
        stream.synchronize().unwrap();
        copies.check(rank, stream);

        // The stream that reads becomes part of the capture by its first wait, and is joined at the end.
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).unwrap();
        for _ in 0..2 {
            copies.start(&mut exchange, [stream, reader])?;
        }
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().expect("the stream captured");
        let results = Exchange::new(rank, stream);
        for result in &mut copies.results {
            stream.memset_zeros(result).unwrap();
        }
        for _ in 0..3 {
            graph.launch().unwrap();
        }
        stream.synchronize().unwrap();
        copies.check(rank, stream);
        // Starts that run at once and replays alternate.
        results.start(&mut exchange, [stream, reader])?;
        stream.synchronize().unwrap();
        results.check(rank, stream);
        Ok(())
    });
}
