"""An emulator of AMD's CDNA instruction set: kernels that Triton compiled for MI200, MI300 and MI350, run on a CPU.

Sources: AMD, "MI200", "MI300" and "CDNA4 Instruction Set Architecture" (reference guides); LLVM,
"User Guide for AMDGPU
Backend" (memory model, registers at the start of a kernel) and its assembly syntax, which is what is read.

Legend: N waves that are at one instruction (a gang), 64 lanes of each, R registers of a lane.
"""
