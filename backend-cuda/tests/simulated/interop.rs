//! Tests memory and streams of cudarc on the simulated driver.

use cudarc::driver::CudaContext;
use peerlane_cuda::{RegionView as _, SliceMemory as _, Stream};
use peerlane_hal::{At, CopyEngine as _, Fabric as _, Op, PeerMemory as _, Rank, Role};

use crate::support::{announce, arrivals, await_arrival, driver, ranks, soon};

#[test]
fn a_slice_is_put_to_a_region_that_cudarc_reads() {
    let (_driver, _turn) = driver();
    let fabrics = ranks(2).unwrap();
    let mut engine = fabrics[0].engine(Default::default()).unwrap();
    let here = CudaContext::new(0).unwrap().new_stream().unwrap();
    let there = CudaContext::new(1).unwrap().new_stream().unwrap();

    let shard: Vec<u32> = (0..1001).collect();
    let slice = here.clone_htod(&shard).unwrap();
    let bytes = 4 * shard.len() as u64;
    // SAFETY: the slice outlives the registration, which is not imported.
    let source = unsafe { fabrics[0].memory().register_slice(&slice, &here, Role::Data) }.unwrap();
    let target = fabrics[1].memory().allocate(bytes, Role::Data).unwrap();
    let key = fabrics[1].memory().export(&target).unwrap();
    let remote = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();
    let arrivals = arrivals(&fabrics[1]);
    let key = fabrics[1].memory().export(&arrivals).unwrap();
    let their_arrivals = fabrics[0].memory().import(Rank(1), &key, soon()).unwrap();

    let stream = Stream::from(&here);
    engine.streams().unwrap().fork(&stream).unwrap();
    let (dst, src) = (At { region: &remote, offset: 0 }, At { region: &source, offset: 0 });
    let ops = [Op::Put { dst, src, bytes }, announce(&their_arrivals, 1)];
    // SAFETY: all of it lives until the stream is synchronised below.
    unsafe { engine.submit(&ops) }.unwrap();
    engine.streams().unwrap().join(&stream).unwrap();
    here.synchronize().unwrap();
    await_arrival(&arrivals, 1);

    // SAFETY: any bytes are `u32`s, and no engine touches them any more.
    let seen =
        unsafe { target.with_view::<u32, _>(&there, shard.len(), |view| there.clone_dtoh(&view)) };
    assert_eq!(seen.unwrap().unwrap(), shard);
    // SAFETY: as above.
    let error = unsafe { target.with_view::<u64, _>(&there, shard.len(), |_| ()) }.unwrap_err();
    assert!(
        error.to_string().ends_with("is too small or misaligned for 1001 elements of type u64"),
        "{error}"
    );
}
