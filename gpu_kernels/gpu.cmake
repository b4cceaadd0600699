# Builds the GPU kernels twice: with g++ for an emulator, on every machine, for tests; and with nvcc
# if a CUDA toolkit is found. The include path selects device.h, linking selects the runtime; no
# kernel contains an #if (docs/gpu.md).
set(TANDEM_CUDA auto CACHE STRING "GPU architectures, e.g. 80;90; all that are supported; auto: by this machine; off")
include(gpu_kernels/architectures.cmake)

file(GLOB gpu_kernels CONFIGURE_DEPENDS gpu_kernels/*.cu gpu_kernels/exchange/*.cu gpu_kernels/attention/*.cu gpu_kernels/products/*.cu)
file(GLOB gpu_decisions CONFIGURE_DEPENDS gpu_kernels/*.cpp)
file(GLOB emulator CONFIGURE_DEPENDS gpu_kernels/emulated/*.cpp)

# CUDA C++ puns types and unrolls by pragma. Under policy CMP0119 an explicit LANGUAGE also passes
# -x c++, which .cu needs. It applies to the whole project, so the CUDA library compiles copies.
set_source_files_properties(${gpu_kernels} PROPERTIES LANGUAGE CXX)
add_library(tandem_gpu_emulated STATIC ${emulator} ${gpu_decisions} ${gpu_kernels})
target_include_directories(tandem_gpu_emulated PUBLIC src . gpu_kernels/emulated)
target_compile_options(tandem_gpu_emulated PUBLIC -Wno-unknown-pragmas -fno-strict-aliasing PRIVATE -O2)
target_link_libraries(tandem_gpu_emulated PUBLIC tandem_core fmt::fmt Threads::Threads)
# A GPU fails at a misaligned access, which a CPU forgives. Most time of tests is spent in the tiles that load by
# cp.async and ldmatrix, whose emulation checks addresses itself.
set(find_misaligned -fsanitize=alignment -fno-sanitize-recover=alignment)
set(loads_vectors ${gpu_kernels})
list(FILTER loads_vectors EXCLUDE REGEX "(matrix_product|grouped_product|mla_prefill)\\.cu$")
set_source_files_properties(${loads_vectors} PROPERTIES COMPILE_OPTIONS "${find_misaligned}")
target_link_options(tandem_gpu_emulated PUBLIC -fsanitize=alignment)
if(TANDEM_SANITIZE)  # ThreadSanitizer does not instrument the scheduler
  set_source_files_properties(gpu_kernels/emulated/emulator.cpp gpu_kernels/emulated/fiber.cpp
                              PROPERTIES COMPILE_OPTIONS -fno-sanitize=thread)
endif()

if(TANDEM_CUDA STREQUAL auto)
  find_program(TANDEM_NVCC nvcc HINTS /usr/local/cuda/bin)
elseif(TANDEM_CUDA)
  find_program(TANDEM_NVCC nvcc HINTS /usr/local/cuda/bin REQUIRED)
endif()
if(NOT TANDEM_CUDA OR NOT TANDEM_NVCC OR TANDEM_SANITIZE)
  return()
endif()
execute_process(COMMAND ${TANDEM_NVCC} --version OUTPUT_VARIABLE nvcc_says)
string(REGEX MATCH "release ([0-9.]+)" found "${nvcc_says}")
if(TANDEM_CUDA STREQUAL auto AND (NOT found OR CMAKE_MATCH_1 VERSION_LESS 12.4))
  message(STATUS "${TANDEM_NVCC} is not of CUDA 12.4 or newer: this build has no GPU")
  return()
endif()

find_program(TANDEM_NVIDIA_SMI nvidia-smi)
ask_nvcc(${TANDEM_NVCC} known)
ask_driver("${TANDEM_NVIDIA_SMI}" here)
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
choose_architectures("${TANDEM_CUDA}" "${known}" "${here}" ${cores} architectures note problem)
if(problem)
  message(FATAL_ERROR "${problem}")
elseif(note)
  message(STATUS "${note}")
endif()

set(CMAKE_CUDA_COMPILER ${TANDEM_NVCC})
set(CMAKE_CUDA_ARCHITECTURES ${architectures})
enable_language(CUDA)
find_package(CUDAToolkit 12.4 REQUIRED)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 has no C++20 option for nvcc
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
foreach(kernel ${gpu_kernels})
  get_filename_component(name ${kernel} NAME)
  configure_file(${kernel} ${CMAKE_BINARY_DIR}/cuda/${name} COPYONLY)
  list(APPEND cuda_kernels ${CMAKE_BINARY_DIR}/cuda/${name})
endforeach()
file(GLOB cuda_runtime CONFIGURE_DEPENDS gpu_kernels/cuda/*.cpp gpu_kernels/cuda/*.cu)
add_library(tandem_gpu_cuda STATIC ${cuda_runtime} ${gpu_decisions} ${cuda_kernels})
set_target_properties(tandem_gpu_cuda PROPERTIES CUDA_STANDARD 20 COMPILE_OPTIONS "")
target_compile_options(tandem_gpu_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-warn-spills;--expt-relaxed-constexpr>"
                                               $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
target_include_directories(tandem_gpu_cuda PUBLIC src . PRIVATE gpu_kernels/cuda)
target_link_libraries(tandem_gpu_cuda PUBLIC fmt::fmt CUDA::cudart_static)
