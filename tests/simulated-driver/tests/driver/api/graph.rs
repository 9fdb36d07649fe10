//! Wraps captures and graphs.

use super::{Answer, cuda, new_event, record, wait_event};

pub(crate) const GLOBAL: i32 = 0;
pub(crate) const THREAD_LOCAL: i32 = 1;
pub(crate) const RELAXED: i32 = 2;

pub(crate) fn begin(stream: usize, mode: i32) -> Answer {
    cuda!(cuStreamBeginCapture_v2(stream => usize, mode => i32))
}

pub(crate) fn end(stream: usize) -> Answer<usize> {
    let mut graph = usize::MAX;
    let answer = cuda!(cuStreamEndCapture(stream => usize, &mut graph => &mut usize));
    assert_eq!(answer.is_err(), graph == 0 || graph == usize::MAX);
    answer.map(|()| graph)
}

/// 0 for none, 1 for a capture, 2 for a spoilt one.
pub(crate) fn status(stream: usize) -> Answer<i32> {
    let mut status = -1;
    cuda!(cuStreamIsCapturing(stream => usize, &mut status => &mut i32)).map(|()| status)
}

pub(crate) fn instantiate(graph: usize) -> usize {
    let mut program = 0;
    cuda!(cuGraphInstantiateWithFlags(
        &mut program => &mut usize, graph => usize, 0 => u64,
    ))
    .unwrap();
    cuda!(cuGraphDestroy(graph => usize)).unwrap();
    program
}

pub(crate) fn launch(program: usize, stream: usize) -> Answer {
    cuda!(cuGraphLaunch(program => usize, stream => usize))
}

/// Lets what `to` gets next come after what `from` holds.
pub(crate) fn order(from: usize, to: usize) -> Answer {
    let event = new_event();
    record(event, from)?;
    wait_event(to, event)
}
