//! Macros that forward calls of a layer to the engine that it wraps.

/// Defines methods of `CopyEngine` that call `self.engine` and wrap its error.
macro_rules! forward_to_engine {
    ($($method:ident)+) => { $($crate::forward::forward_to_engine!(=> $method);)+ };
    (=> caps) => {
        fn caps(&self) -> &peerlane_hal::Caps {
            self.engine.caps()
        }
    };
    (=> prepare_reduce) => {
        fn prepare_reduce(&mut self) -> Result<Option<peerlane_hal::Reducer>, Self::Error> {
            self.engine.prepare_reduce().map_err($crate::Error::Inner)
        }
    };
    (=> waker) => {
        fn waker(&self) -> std::task::Waker {
            self.engine.waker()
        }
    };
    (=> completed) => {
        fn completed(&mut self) -> Result<peerlane_hal::Ticket, Self::Error> {
            self.engine.completed().map_err($crate::Error::Inner)
        }
    };
    (=> park) => {
        fn park(&mut self, limit: std::time::Duration) -> Result<(), Self::Error> {
            self.engine.park(limit).map_err($crate::Error::Inner)
        }
    };
    (=> is_busy) => {
        fn is_busy(&self) -> bool {
            self.engine.is_busy()
        }
    };
    (=> release) => {
        fn release(&mut self) -> Result<(), Self::Error> {
            self.engine.release().map_err($crate::Error::Inner)
        }
    };
    (=> compute_bytes) => {
        fn compute_bytes(
            &mut self,
            ops: &[peerlane_hal::Op<'_, Self::Local, Self::Remote>],
            captured: bool,
        ) -> u64 {
            self.engine.compute_bytes(ops, captured)
        }
    };
    (=> streams) => {
        fn streams(
            &mut self,
        ) -> Option<&mut dyn peerlane_hal::StreamOrdered<Error = Self::Error>> {
            if self.engine.streams().is_none() { None } else { Some(self) }
        }
    };
}
pub(crate) use forward_to_engine;

/// Implements `StreamOrdered` for a layer by forwarding each call to the streams of `self.engine`.
/// Each method calls `$before` first if it is given.
macro_rules! forward_streams {
    ([$($generics:tt)*] $layer:ty $(, $before:ident)?) => {
        // SAFETY: the layer passes all calls on to an implementation that upholds the contract.
        unsafe impl<$($generics)*> peerlane_hal::StreamOrdered for $layer {
            type Error = <Self as peerlane_hal::CopyEngine>::Error;

            fn capture_state(
                &mut self,
                stream: &dyn std::any::Any,
            ) -> Result<peerlane_hal::CaptureState, Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.capture_state(stream).map_err($crate::Error::Inner)
            }

            fn fork(&mut self, from: &dyn std::any::Any) -> Result<(), Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.fork(from).map_err($crate::Error::Inner)
            }

            fn fork_beside(&mut self, from: &dyn std::any::Any) -> Result<(), Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.fork_beside(from).map_err($crate::Error::Inner)
            }

            fn mark(&mut self) -> Result<peerlane_hal::Mark, Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.mark().map_err($crate::Error::Inner)
            }

            fn order_after(
                &mut self,
                mark: peerlane_hal::Mark,
                into: &dyn std::any::Any,
            ) -> Result<(), Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.order_after(mark, into).map_err($crate::Error::Inner)
            }

            fn join(&mut self, into: &dyn std::any::Any) -> Result<(), Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.join(into).map_err($crate::Error::Inner)
            }

            fn replay_wait(&mut self) -> Result<Option<std::time::Duration>, Self::Error> {
                $(self.$before()?;)?
                let streams = self.engine.streams().expect("the engine has streams");
                streams.replay_wait().map_err($crate::Error::Inner)
            }
        }
    };
}
pub(crate) use forward_streams;
