//! Passes streams that cannot take a start.

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::Group;
use peerlane_hal::ErrorKind;
use peerlane_host as host;
use peerlane_tests::middleware::{DowngradeLayer, Stream, StreamLayer, Wrapped};

use crate::support::{BLOCK_BYTES, Foreign, LONG, in_group};

#[test]
fn a_stream_of_another_backend() {
    in_group(2, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(4).prepare().unwrap();
        let error = gather.start_on(&Foreign).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(
            error.to_string(),
            "cannot query whether the stream captures: the stream has the wrong type, expected \
             peerlane_layers::streams::Stream"
        );
        // Nothing has started.
        gather.start_on(&Stream::new()).unwrap().wait().unwrap();
        drop(gather);
        group.close().unwrap();
    });
}

#[test]
fn any_stream_where_the_backend_has_none() {
    let refused = in_process::run(1, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = Group::open(bootstrap, fabric)?;
        let mut gather = group.all_gather::<u8>(4).prepare()?;
        let error = gather.start_on(&Stream::new()).unwrap_err();
        drop(gather);
        group.close()?;
        Ok((error.kind(), error.to_string()))
    });
    let (kind, text) = &refused.unwrap()[0];
    assert_eq!(*kind, ErrorKind::Mismatch);
    assert_snapshot!(text, @"processor engines of the backend host cannot run on a stream; use `start`");
}

#[test]
fn any_stream_where_waits_cannot_be_queued() {
    let refused = in_process::run(1, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let fabric = Wrapped::new(fabric, StreamLayer::default());
        let layer = DowngradeLayer { queued_wait: false, ..DowngradeLayer::default() };
        let mut group = Group::open(bootstrap, Wrapped::new(fabric, layer))?;
        let mut gather = group.all_gather::<u8>(4).prepare()?;
        let error = gather.start_on(&Stream::new()).unwrap_err();
        gather.run()?;
        drop(gather);
        group.close()?;
        Ok((error.kind(), error.to_string()))
    });
    let (kind, text) = &refused.unwrap()[0];
    assert_eq!(*kind, ErrorKind::InvalidArgument);
    assert_snapshot!(text, @"the engines cannot queue waits, which a start on a stream needs; use `start`");
}

/// The engines of this layer cannot add, so the processor does.
#[test]
fn an_addition_that_a_stream_cannot_wait_for_is_refused() {
    for ranks in [1, 2, 3] {
        in_group(ranks, LONG, |mut group| {
            let mut reduce = group.all_reduce::<u8>(BLOCK_BYTES).prepare().unwrap();
            let error = reduce.start_on(&Stream::new()).map(drop).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert!(
                error.to_string().starts_with("the processor adds the contributions"),
                "{error}"
            );

            // Nothing has started, and the host can make the start.
            reduce.input_mut().unwrap().fill(1);
            reduce.run().unwrap();
            assert_eq!(reduce.output().unwrap(), [ranks as u8; BLOCK_BYTES]);
            drop(reduce);
            group.close().unwrap();
        });
    }
}
