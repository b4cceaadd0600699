# Tests of GPU kernels: gpu_*_test.cpp, or .cu where a test contains kernels. They run on the emulated GPU in
# three orders of its threads, and are linked with CUDA into one program, gpu_tests_cuda, for machines with a
# GPU (tests/gpu_check.sh). Tests named engine or hybrid are linked with the whole program.
function(link_gpu_test target name gpu)
  if(name MATCHES "engine|hybrid")
    target_link_libraries(${target} PRIVATE test_support tandem_app_${gpu})
  else()
    target_link_libraries(${target} PRIVATE tandem_engine tandem_gpu_${gpu})
  endif()
  target_link_libraries(${target} PRIVATE GTest::gtest)
endfunction()

add_library(gpu_main OBJECT gpu_main.cpp)
target_link_libraries(gpu_main PRIVATE tandem_io GTest::gtest)
file(GLOB gpu_tests CONFIGURE_DEPENDS gpu_*_test.cpp gpu_*_test.cu)
if(TANDEM_SANITIZE)  # sanitizers replace malloc
  list(FILTER gpu_tests EXCLUDE REGEX allocations_test)
endif()
foreach(source ${gpu_tests})
  get_filename_component(name ${source} NAME_WE)
  set_source_files_properties(${source} PROPERTIES LANGUAGE CXX)
  add_test_file(${source})
  set(program_of_${name} ${program})
  list(APPEND gpu_programs ${program})
  set(orders forward reverse shuffled)
  set(cost 1)  # seconds; ctest starts the longest tests first
  set(label)
  if(name MATCHES "gpu_(engine_(batches|bench|graphs|swap)|hybrid_(rank_workers|steps|streaming))_test")
    set(label long)  # make test-long
  endif()
  if(name MATCHES "engine|hybrid")
    set(cost 60)
  endif()
  if(name MATCHES "engine|hybrid" OR TANDEM_SANITIZE MATCHES thread)  # kernel tests run in all three orders
    set(orders reverse)
  endif()
  # ThreadSanitizer finds missing barriers in any order, and takes ten minutes for each of these.
  if(TANDEM_SANITIZE MATCHES thread AND name MATCHES gpu_engine)
    set(orders)
  endif()
  # make test runs one order, and not all cases; make test-long runs the rest.
  cases_for_long(${name})
  foreach(order ${orders})
    set(label_of_order "${label}")
    if(NOT order STREQUAL reverse)
      set(label_of_order long)
    endif()
    add_test(NAME ${name}_${order} COMMAND ${CMAKE_CURRENT_BINARY_DIR}/${name} --gtest_filter=-${rest})
    set_tests_properties(${name}_${order} PROPERTIES ENVIRONMENT TANDEM_GPU_ORDER=${order} TIMEOUT ${seconds}
                                                         COST ${cost} LABELS "${label_of_order}")
  endforeach()
  if(rest AND orders)
    add_test(NAME rest_of_${name} COMMAND ${CMAKE_CURRENT_BINARY_DIR}/${name} --gtest_filter=${rest})
    set_tests_properties(rest_of_${name} PROPERTIES ENVIRONMENT "TANDEM_GPU_ORDER=reverse;TANDEM_LONG_TEST=1"
                                                    TIMEOUT ${seconds} COST ${cost} LABELS long)
  endif()
  # These count operations of the emulator, or have ranks that share a GPU, which NCCL refuses.
  if(NOT name MATCHES "gpu_emulator_test|gpu_hybrid_allocations_test|gpu_decode_cost_test|(gpu_engine_(ranks|exchanged|hosts)|gpu_hybrid_(rank|replica)_workers)_test")
    get_filename_component(file ${source} NAME)
    if(file MATCHES "cu$")
      configure_file(${source} ${CMAKE_BINARY_DIR}/cuda/${file} COPYONLY)
      set(source ${CMAKE_BINARY_DIR}/cuda/${file})
    endif()
    list(APPEND cuda_tests ${source})
  endif()
endforeach()
list(REMOVE_DUPLICATES gpu_programs)
foreach(program ${gpu_programs})
  link_gpu_test(${program} ${program} emulated)
  target_link_libraries(${program} PRIVATE gpu_main)
  precompile_headers(${program})
endforeach()
add_library(fake_cublas MODULE fake_cublas.cpp fake_cublas_grouped.cpp)
add_library(fake_cublas_12_4 MODULE fake_cublas.cpp)
set_target_properties(fake_cublas fake_cublas_12_4 PROPERTIES CXX_VISIBILITY_PRESET default)
add_dependencies(${program_of_gpu_engine_cublas_test} fake_cublas fake_cublas_12_4)
target_compile_definitions(${program_of_gpu_engine_cublas_test} PRIVATE
                           TANDEM_FAKE_CUBLAS="$<TARGET_FILE:fake_cublas>"
                           TANDEM_FAKE_CUBLAS_12_4="$<TARGET_FILE:fake_cublas_12_4>")
set_source_files_properties(gpu_emulator_test.cu PROPERTIES SKIP_PRECOMPILE_HEADERS ON
                            COMPILE_OPTIONS "${find_misaligned}")
# The program with the emulated GPU.
add_executable(tandem_emulated $<TARGET_OBJECTS:tandem_main>)
target_link_libraries(tandem_emulated PRIVATE tandem_app_emulated)
if(NOT TANDEM_SANITIZE MATCHES thread)  # whole models take too long, as above
  add_test(NAME gpu_cli_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_cli_test.py
                                     $<TARGET_FILE:tandem_emulated> $<TARGET_FILE:tandem>)
  set_tests_properties(gpu_cli_test PROPERTIES TIMEOUT ${seconds} COST 20)
  add_test(NAME gpu_prefill_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_prefill_test.py
                                         $<TARGET_FILE:tandem_emulated>)
  set_tests_properties(gpu_prefill_test PROPERTIES TIMEOUT ${seconds} COST 20)
  add_test(NAME gpu_workers_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_workers_test.py
                                         $<TARGET_FILE:tandem_emulated>)
  add_test(NAME gpu_worker_moves_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_worker_moves_test.py
                                              $<TARGET_FILE:tandem_emulated>)
  set_tests_properties(gpu_workers_test gpu_worker_moves_test PROPERTIES LABELS long TIMEOUT ${seconds} COST 20)
  if(NOT TANDEM_SANITIZE)  # sanitizers do not know what MPI does
    add_test(NAME gpu_replica_workers_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_replica_workers_test.py
                                                   $<TARGET_FILE:tandem_emulated>)
    set_tests_properties(gpu_replica_workers_test PROPERTIES LABELS long SKIP_RETURN_CODE 77 TIMEOUT ${seconds} COST 40)
    add_test(NAME gpu_ranks_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_ranks_test.py
                                         $<TARGET_FILE:tandem_emulated> GpuRanks)
    add_test(NAME gpu_ranks_lost_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/gpu_ranks_test.py
                                              $<TARGET_FILE:tandem_emulated> GpuRanksLost)
    add_test(NAME gpu_rank_faults_test COMMAND Python3::Interpreter ${CMAKE_CURRENT_SOURCE_DIR}/rank_faults_test.py
                                               $<TARGET_FILE:tandem_emulated> --device cuda --at-once 2)
    set_tests_properties(gpu_rank_faults_test PROPERTIES LABELS long ENVIRONMENT TANDEM_RANK_FAULTS=4)
    set_tests_properties(gpu_ranks_test gpu_ranks_lost_test gpu_rank_faults_test PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${seconds} COST 60)
    set_tests_properties(gpu_ranks_lost_test PROPERTIES LABELS long)
  endif()
endif()
if(TARGET tandem_gpu_cuda)
  add_executable(gpu_tests_cuda EXCLUDE_FROM_ALL ${cuda_tests} $<TARGET_OBJECTS:gpu_main>)
  set_target_properties(gpu_tests_cuda PROPERTIES CUDA_STANDARD 20)
  target_include_directories(gpu_tests_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/gpu_kernels/cuda)
  target_compile_definitions(gpu_tests_cuda PRIVATE TANDEM_FAKE_CUBLAS="" TANDEM_FAKE_CUBLAS_12_4="")
  link_gpu_test(gpu_tests_cuda engine cuda)
endif()
