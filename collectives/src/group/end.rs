//! Reports the end of a group to callers that wait for it with a file descriptor, a future or a check.

use std::future::Future;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use crate::error::Error;
use crate::group::event::Event;
use crate::group::life::{GroupState, LifeCycle};

const END: &str = "the end of the group";

/// A handle that becomes ready when a group has ended: as a file descriptor, as a future, or by a check.
///
/// Its descriptor becomes readable, and stays so, when the group has ended or was closed; do not read from it. As a future it
/// returns the error with which the group has ended. [`check`](Self::check) costs one atomic load.
///
/// ```
/// use std::os::fd::AsFd;
///
/// use peerlane::bootstrap::{Bootstrap, in_process};
/// use peerlane::group::GroupState;
/// use peerlane::{Group, host};
///
/// in_process::run(1, |bootstrap| {
///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
///     let group = Group::open(bootstrap, fabric)?;
///     let end = group.end()?;
///     assert!(end.check().is_ok());
///     let _polled_by_an_event_loop = end.as_fd();
///     assert_eq!(end.state(), GroupState::Open);
///     group.close()?;
///     assert!(end.check().is_err());
///     assert_eq!(end.state(), GroupState::Closed);
///     Ok(())
/// })
/// .unwrap();
/// ```
pub struct GroupEnd {
    life: Arc<LifeCycle>,
    event: Arc<Event>,
}

impl GroupEnd {
    pub(super) fn new(life: &Arc<LifeCycle>) -> Result<Self, Error> {
        let event = Arc::<Event>::default();
        event.descriptor(END)?;
        life.add_end(&event);
        Ok(Self { life: Arc::clone(life), event })
    }

    /// Returns the reason as an error if the group has ended.
    ///
    /// # Errors
    /// The reason why the group has ended, or that it was closed.
    pub fn check(&self) -> Result<(), Error> {
        self.life.check()
    }

    /// Returns the state of the group on this rank.
    pub fn state(&self) -> GroupState {
        self.life.group_state()
    }
}

impl AsFd for GroupEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.descriptor(END).expect("the descriptor exists since `new`")
    }
}

impl Future for GroupEnd {
    type Output = Error;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Error> {
        self.event.set_waker(context.waker());
        // After the waker is set, so that an end in between is not missed.
        match self.check() {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(error),
        }
    }
}

impl std::fmt::Debug for GroupEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupEnd").field("ended", &self.life.is_aborted()).finish_non_exhaustive()
    }
}
