//! Gathers from and into memory of the crate cudarc, through the facade, on the simulated driver.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, result};
use peerlane::bootstrap::{Bootstrap, in_process};
use peerlane::hal::Rank;
use peerlane::{Algorithm, Error, ErrorKind, Group, MemoryRange, RegisterSlice, cuda, host};

const RANKS: usize = 3;
const LEN: usize = 1001;

/// Runs every rank on a thread of its own, with the device of its number and a stream there.
fn on_ranks(rank: impl Fn(&mut Group, &Arc<CudaStream>) -> Result<(), Error> + Sync) {
    let _driver = peerlane_simulated_driver::install();
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
    let _driver = peerlane_simulated_driver::install();
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
